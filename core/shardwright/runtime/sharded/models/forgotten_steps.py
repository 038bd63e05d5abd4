"""Warning for loops whose tables are updated in the step (``update="in_step"``), and that never make it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardwright.runtime.sharded.tables.fused_optimizer import FusedOptimizer
from shardwright.runtime.sharded.tables.sharded_parameter import ShardedParameter

MANY_STEPS = 10
"""Steps of another optimizer without one of the tables' until the warning; loops that accumulate make fewer (taste)."""


class _StepWatch:
    """Steps of a model's dense optimizers while gradients of its tables are kept and were never applied.

    Args:
        parts: fused optimizers of the model's collections.
    """

    def __init__(self, parts: Sequence[FusedOptimizer]) -> None:
        self._parts, self._num_steps = list(parts), 0

    def note(self, model: nn.Module, optimizer: Optimizer) -> bool:
        """Count a step of an optimizer; returns whether there is nothing more to watch for."""
        waiting = [table for part in self._parts if not part.has_stepped for table in part.kept_tables]
        if not waiting or not _is_dense_optimizer(optimizer, model):
            return all(part.has_stepped for part in self._parts)
        self._num_steps += 1
        if self._num_steps < MANY_STEPS:
            return False
        warnings.warn(
            f"{type(optimizer).__name__} made {MANY_STEPS} steps over dense parameters, but gradients of table "
            f"{', '.join(waiting)} are kept for fused_optimizer.step() (update='in_step'), which was never called: "
            "nothing trains it. Call model.fused_optimizer.step() and zero_grad() beside the other optimizer's, or "
            "both by a CombinedOptimizer",
            RuntimeWarning,
            stacklevel=4,  # the line that calls step(), through torch's wrapper and the hook
        )
        return True


_watched: WeakKeyDictionary[nn.Module, _StepWatch] = WeakKeyDictionary()


def watch_for_forgotten_steps(model: nn.Module, parts: Sequence[FusedOptimizer]) -> None:
    """Warn once, by the names of the tables, if a model's dense parameters are trained and its tables are not.

    Args:
        model: model with the dense parameters.
        parts: fused optimizers of its collections.
    """
    kept = [part for part in parts if any(table.in_step for table in part.tables.values())]
    if kept:
        _listen()
        _watched[model] = _StepWatch(kept)


@cache
def _listen() -> None:
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: Optimizer, *_: Any) -> None:
    for model, watch in list(_watched.items()):
        if watch.note(model, optimizer):
            _watched.pop(model, None)  # another thread may have done it


def _is_dense_optimizer(optimizer: Optimizer, model: nn.Module) -> bool:
    """Tell if an optimizer has dense parameters of a model; one that has tables too may train them by itself."""
    trained = [own for group in optimizer.param_groups for own in group["params"]]
    if any(isinstance(own, ShardedParameter) for own in trained):
        return False
    of_model = {id(own) for _, own in model.named_parameters()}
    return any(id(own) in of_model for own in trained)
