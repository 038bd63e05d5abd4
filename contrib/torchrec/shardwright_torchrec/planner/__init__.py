"""TorchRec's planner, over shardwright's."""
