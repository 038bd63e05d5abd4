"""Checkpoints in shards, over ``torch.distributed.checkpoint`` (DCP)."""
