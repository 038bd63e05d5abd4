"""Enumerations and bases that scripts name."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Generic, TypeVar

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    TensorProperties,
)

import shardwright as sw

__all__ = [
    "BoundsCheckMode",
    "CacheAlgorithm",
    "ModuleShardingPlan",
    "NoWait",
    "PipelineType",
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "ShardedTensorMetadata",
    "TensorProperties",
    "get_tensor_size_bytes",
]

_W = TypeVar("_W")
ModuleShardingPlan = sw.EmbeddingModuleShardingPlan


class BoundsCheckMode(IntEnum):
    """Ways to treat ids beyond a table; FBGEMM's numbers."""

    FATAL = 0
    WARNING = 1
    IGNORE = 2
    NONE = 3
    V2_IGNORE = 4
    V2_WARNING = 5
    V2_FATAL = 6


class CacheAlgorithm(Enum):
    """Rows that a cache on the device lets go first; FBGEMM's numbers."""

    LRU = 0
    LFU = 1


class PipelineType(Enum):
    """Kinds of training loops, by the batches that are in flight."""

    NONE = "none"
    TRAIN_BASE = "train_base"
    TRAIN_SPARSE_DIST = "train_sparse_dist"
    TRAIN_PREFETCH_SPARSE_DIST = "train_prefetch_sparse_dist"


class NoWait(sw.Awaitable[_W], Generic[_W]):
    """A value that is there already.

    Args:
        obj: the value.
    """

    def __init__(self, obj: _W) -> None:
        super().__init__()
        self._obj = obj

    def _wait_impl(self) -> _W:
        return self._obj


def get_tensor_size_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.element_size() * tensor.nelement()
