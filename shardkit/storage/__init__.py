"""Reads and writes of byte ranges, whatever the bytes mean."""
