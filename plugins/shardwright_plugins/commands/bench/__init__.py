"""`shardwright bench`: how long things take, beside another program where one is given."""
