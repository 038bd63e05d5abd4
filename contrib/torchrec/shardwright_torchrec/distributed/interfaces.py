"""Bases that scripts ask with `isinstance`, or derive from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Any, NamedTuple

import torch

import shardwright as sw

__all__ = [
    "CommOp",
    "DataParallelWrapper",
    "MultiPassPrefetchConfig",
    "ShardedModule",
    "ShardingPlanner",
]


class ShardedModule(ABC):
    """A collection that has been sharded: `isinstance` is true of shardwright's.

    How such a module exchanges and looks up is not open to subclasses; a compute kernel or a sharding type is.
    """

    @abstractmethod
    def forward(self, *input: Any, **kwargs: Any) -> Any:
        """Awaitable of the output."""


ShardedModule.register(sw.ShardedEmbeddingBagCollection)
ShardedModule.register(sw.ShardedEmbeddingCollection)


class ShardingPlanner(ABC):
    """A planner: shardwright's, or a script's own, whose plan goes to `DistributedModelParallel(plan=)`."""

    @abstractmethod
    def plan(self, module: torch.nn.Module, sharders: list[sw.ModuleSharder]) -> sw.ShardingPlan:
        """The plan of a model, made on this rank."""

    @abstractmethod
    def collective_plan(self, module: torch.nn.Module, sharders: list[sw.ModuleSharder]) -> sw.ShardingPlan:
        """The same plan on all ranks."""


ShardingPlanner.register(sw.EmbeddingShardingPlanner)


class DataParallelWrapper(ABC):
    """A wrapper of what is not sharded; `DistributedModelParallel` takes shardwright's `DefaultDataParallelWrapper`."""

    @abstractmethod
    def wrap(self, dmp: Any, env: sw.ShardingEnv, device: torch.device) -> None:
        """Wrap the model in place."""


DataParallelWrapper.register(sw.DefaultDataParallelWrapper)


class CommOp(Enum):
    """Collectives of embeddings, as codecs are chosen for them in TorchRec."""

    POOLED_EMBEDDINGS_ALL_TO_ALL = "pooled_embeddings_all_to_all"
    POOLED_EMBEDDINGS_REDUCE_SCATTER = "pooled_embeddings_reduce_scatter"
    SEQUENCE_EMBEDDINGS_ALL_TO_ALL = "sequence_embeddings_all_to_all"


class MultiPassPrefetchConfig(NamedTuple):
    """Parts in which a cache is filled: their number, and the least bytes of one."""

    num_passes: int = 12
    min_splitable_pass_size: int = 6 * 1024 * 1024
