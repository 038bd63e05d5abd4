"""`shardwright checkpoint`: what checkpoints hold, whether they are whole, and other forms of them."""
