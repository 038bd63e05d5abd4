"""Sharders and model of TorchRec's scripts: shardwright's own, bent to TorchRec's ways where scripts need it.

- Tables of type `data_parallel` without an optimizer of their own are plain parameters, which the script's optimizer
  updates. In shardwright FBGEMM's default, SGD at 0.01, runs in the backward pass, as with all sharding types.
- `state_dict()` is local: `ShardedTensor`s of this rank's shards. In shardwright it has sharded tensors of another
  class, which may have any rows and columns.
"""
