"""`shardkit repair`: a dataset made whole again from what its shards still hold."""
