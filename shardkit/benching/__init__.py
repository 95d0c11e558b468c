"""Measures the ways to read and decode a dataset, side by side, each in a process of its own."""
