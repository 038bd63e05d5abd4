"""What is not sharded: data parallelism, sums of gradients, scaled losses."""
