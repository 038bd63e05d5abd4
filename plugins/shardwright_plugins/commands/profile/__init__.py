"""`shardwright profile`: constraints for planning from a sample of the data."""
