"""The learning rates of fused optimizers: a step keeps, to its end, the rate with which its forward pass began.

FBGEMM does the same: its forward pass takes the rate along for its backward pass (tested with 1.8, on the CPU). So does
TorchRec: a scheduler or ``zero_grad()`` between the two passes changes the next step only. Kernels may read the rate in
either pass: both see the rate of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from shardwright.contracts.lookup import Lookup
from shardwright.planning.tables.optimizers import OptimizerSpec

Rates: TypeAlias = tuple[float | None, ...]


class LearningRates:
    """The learning rates of the lookups of one rank.

    Args:
        lookups: the lookups, in the engine's order. Lookups whose optimizer is the user's have no rate.

    Attributes:
        now: current rate of each lookup, or ``None``.
    """

    def __init__(self, lookups: Sequence[Lookup]) -> None:
        # The optimizer that runs in a lookup's backward pass; none where it is the user's.
        self._specs = [None if own.parameters() else own.blocks[0].request.optimizer for own in lookups]
        self._lookups = list(lookups)
        self.now: Rates = tuple(None if spec is None else spec.learning_rate for spec in self._specs)

    def set(self, rate_of: Callable[[OptimizerSpec], float | None]) -> None:
        """Give each lookup the rate of its optimizer, from the next forward pass on; ``None`` leaves it."""
        self.exchanged(tuple(None if spec is None else rate_of(spec) for spec in self._specs))

    def renew(self, rate_of: Callable[[OptimizerSpec], float | None]) -> None:
        """Give each lookup the rate of its optimizer, whatever it had: some may have been used before."""
        known, self.now = self.now, (None,) * len(self._lookups)
        self.set(rate_of)
        self.now = tuple(old if new is None else new for old, new in zip(known, self.now, strict=True))

    def exchanged(self, rates: Rates) -> Rates:
        """Give the lookups ``rates``, an earlier :attr:`now`, for the backward pass of its step; return the others."""
        before = self.now
        if rates != before:
            for lookup, old, new in zip(self._lookups, before, rates, strict=True):
                if new is not None and new != old:
                    lookup.set_learning_rate(new)
            self.now = tuple(old if new is None else new for old, new in zip(before, rates, strict=True))
        return before
