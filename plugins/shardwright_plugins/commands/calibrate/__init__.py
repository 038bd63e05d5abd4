"""`shardwright calibrate`: measures a machine, so that plans are made for it."""
