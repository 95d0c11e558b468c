"""Foreign shards adopted where they lie: what they hold is found out, and written down as a dataset's indexes."""
