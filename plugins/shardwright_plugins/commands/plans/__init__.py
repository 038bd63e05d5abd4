"""`shardwright explain` and `shardwright diff`: questions about plan documents."""
