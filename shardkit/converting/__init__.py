"""`shardkit convert`: datasets and foreign WebDataset shards become aligned, indexed shards, by pack's own engine."""
