"""Batches of encoded bytes become arrays."""
