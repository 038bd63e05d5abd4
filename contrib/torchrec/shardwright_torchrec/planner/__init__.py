"""TorchRec's planner over shardwright's, both ways.

- What a script takes from TorchRec (`GreedyProposer`, `EmbeddingPerfEstimator`, ...) becomes the plugin of that name.
- What a script has written after TorchRec's interfaces (a `Proposer`, `Partitioner` or `ShardEstimator` of its own) is
  wrapped, and works in shardwright's search.

In between are `ShardingOption`s, one Python object for each option and shard, made of shardwright's columns.
"""
