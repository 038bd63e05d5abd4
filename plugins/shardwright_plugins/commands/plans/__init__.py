"""`shardwright check`, `explain` and `diff`: questions about plan documents."""
