"""`shardwright doctor`: what is installed, whether it works together, and what would mend it."""
