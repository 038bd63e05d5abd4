"""`shardwright bench`: what estimators predict, held against the clock."""
