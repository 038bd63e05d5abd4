"""`shardwright bench truth`: predicted times of plans beside measured ones."""
