"""What foreign shards hold, found out without reading a payload."""
