"""`shardwright plugin`: the beginning of a plugin."""
