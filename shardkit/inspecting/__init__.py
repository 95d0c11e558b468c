"""Inspecting: what a dataset holds, in figures and on a page."""
