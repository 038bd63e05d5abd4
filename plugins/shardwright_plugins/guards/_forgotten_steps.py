"""Warning for loops whose tables are updated in the step (``update="in_step"``), and that never make it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from shardwright.contracts import TrainedCollection

MANY_STEPS = 10
"""Steps of another optimizer without one of the tables' until the warning; loops that accumulate make fewer (taste)."""


class StepWatch:
    """Steps of a model's dense optimizers while gradients of its tables are kept and were never applied.

    Args:
        model: the model.
        collections: collections of the model with tables that are updated in the step.
    """

    # Each step asks it: sets of identities take no calls of Python.
    def __init__(self, model: nn.Module, collections: Sequence[TrainedCollection]) -> None:
        self._waiting, self._num_steps = list(collections), 0
        self._dense = {id(own) for own in model.parameters() if not hasattr(own, "_in_backward_optimizers")}

    def has_stepped(self, collection: TrainedCollection) -> None:
        """Note that the optimizer of a collection's tables makes its step."""
        self._waiting = [own for own in self._waiting if own is not collection]

    def note(self, optimizer: Optimizer) -> bool:
        """Count a step of an optimizer; returns whether there is nothing more to watch for."""
        if not self._waiting:
            return True
        trains_dense = False
        for group in optimizer.param_groups:
            trains_dense = trains_dense or not self._dense.isdisjoint(map(id, group["params"]))
            for own in group["params"]:
                if hasattr(own, "_in_backward_optimizers"):  # it may train the tables by itself
                    return False
        if not trains_dense:
            return False
        tables = [table for own in self._waiting if own.has_gradients() for table in own.updated_in_step]
        if not tables:
            return False
        self._num_steps += 1
        if self._num_steps < MANY_STEPS:
            return False
        warnings.warn(
            f"{type(optimizer).__name__} made {MANY_STEPS} steps over dense parameters, but gradients of table "
            f"{', '.join(tables)} are kept for fused_optimizer.step() (update='in_step'), which was never called: "
            "nothing trains it. Call model.fused_optimizer.step() and zero_grad() beside the other optimizer's, or "
            "both by a CombinedOptimizer",
            RuntimeWarning,
            stacklevel=5,  # the line that calls step(), through torch's wrapper and the hook
        )
        return True
