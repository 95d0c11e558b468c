"""Shards joined with their index: open, locate, order, fetch."""
