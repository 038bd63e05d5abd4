"""An optimizer that clips gradients before it steps."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

import shardwright as sw


class GradientClipping(Enum):
    """Ways to clip."""

    NORM = "norm"
    VALUE = "value"
    NONE = "none"


class GradientClippingOptimizer(sw.OptimizerWrapper):
    """Clips the gradients of its optimizer's parameters, then steps it.

    Tables that are updated in the backward pass have no gradients by then: shard them with `update="in_step"`.

    Args:
        optimizer: the optimizer within.
        clipping: `NORM`, one norm of all gradients; `VALUE`, each element; or `NONE`.
        max_gradient: largest norm or element.
        norm_type: power of the norm, or `"inf"`.
        enable_global_grad_clip: one norm over all ranks, which shardwright has always.
        param_to_pgs: not needed; parameters know their ranks.
        track_grad_norm: keep the norm in `last_total_grad_norm`.
    """

    def __init__(
        self,
        optimizer: sw.KeyedOptimizer,
        clipping: GradientClipping = GradientClipping.NONE,
        max_gradient: float = 0.1,
        norm_type: float | str = 2.0,
        enable_global_grad_clip: bool = False,
        param_to_pgs: Any = None,
        track_grad_norm: bool = False,
    ) -> None:
        super().__init__(optimizer)
        self._clipping, self._max_gradient, self._norm_type = clipping, max_gradient, float(norm_type)
        self._tracks, self.last_total_grad_norm = track_grad_norm, None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip, then step."""
        parameters = [own for group in self.param_groups for own in group["params"]]
        if self._clipping is GradientClipping.NORM:
            norm = sw.clip_grad_norm_(parameters, self._max_gradient, self._norm_type)
            self.last_total_grad_norm = norm if self._tracks else None
        elif self._clipping is GradientClipping.VALUE:
            torch.nn.utils.clip_grad_value_(parameters, self._max_gradient)
        return super().step(closure)
