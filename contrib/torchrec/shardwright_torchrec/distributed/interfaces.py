"""Bases that scripts ask with `isinstance`, or derive from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

import shardwright as sw


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
