"""`shardwright docs`: the pages of documentation that are installed."""
