"""Optimizers that run in the backward pass, as scripts name them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

import shardwright as sw

_OPTIMIZERS = "_in_backward_optimizers"
"""Attribute of a parameter where torch's `_apply_optimizer_in_backward` and shardwright keep its optimizers."""


class FusedOptimizer(sw.KeyedOptimizer, ABC):
    """An optimizer whose update is made in the backward pass: a step does nothing more."""

    def step(self, closure: Any = None) -> None:
        """Do nothing."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Do nothing: there are no gradients after the update."""


class EmptyFusedOptimizer(FusedOptimizer):
    """The optimizer of no parameters."""

    def __init__(self) -> None:
        super().__init__({}, {}, [])


class InBackwardOptimizer(FusedOptimizer):
    """The optimizers that were applied in the backward pass of parameters, as one.

    Args:
        params: parameters by name.
    """

    def __init__(self, params: Mapping[str, torch.nn.Parameter]) -> None:
        optimizers = [own for parameter in params.values() for own in getattr(parameter, _OPTIMIZERS, ())]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        state = {
            parameter: optimizer.state[parameter]
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        super().__init__(params, state, groups)


class FusedOptimizerModule(ABC):
    """A module that has an optimizer in its backward pass."""

    @property
    @abstractmethod
    def fused_optimizer(self) -> sw.KeyedOptimizer:
        """The optimizer."""


FusedOptimizerModule.register(sw.ShardedEmbeddingBagCollection)
FusedOptimizerModule.register(sw.ShardedEmbeddingCollection)
