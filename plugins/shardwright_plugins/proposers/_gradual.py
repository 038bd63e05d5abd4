"""A plan brought down a little at a time, where its gap is wide: each time within reach of the one before.

A repair that is asked for too much finds nothing at all; asked for a few percent, it changes the options of a few
tables on the fullest ranks, and goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwright_plugins.packing.assignment import Assignment
from shardwright_plugins.proposers._descent import descended

# The part by which a time is to be less at first; how it changes after a success and a failure; the most, and the least
# that is worth a try; and tries.
_FIRST, _MORE, _LESS, _MOST, _LEAST, _TRIES = 0.1, 1.5, 0.5, 0.3, 4e-3, 60
_WORTHWHILE = 2e-3
# Moves and swaps, options changed, and bins with which one's items are shared out, of a try.
_STEPS, _CHANGES, _FEW_CHANGES, _PAIRS = 60, 30, 10, 4


def gradually(plan: Assignment, low_ms: float, *, enough: float = 0.0) -> Iterator[Assignment]:
    """Plans better and better, until even a little less time is out of reach.

    Args:
        plan: to begin with, within all memories.
        low_ms: no plan is faster.
        enough: the gap at which a plan is good enough.
    """
    step = _FIRST
    for _ in range(_TRIES):
        is_enough = plan.value_ms <= low_ms * (1 + enough)
        if step < _LEAST or is_enough or plan.bins.effort.is_spent:
            return
        limit = plan.value_ms * (1 - step)
        better = _better(plan, limit) if limit > low_ms else None
        if better is None:
            step *= _LESS
            continue
        plan, step = better, min(step * _MORE, _MOST)
        yield plan


def _better(plan: Assignment, limit_ms: float) -> Assignment | None:
    """A plan that is faster by enough, by repair or by descent towards a time."""
    enough = plan.value_ms * (1 - _WORTHWHILE)
    trial = plan.copy()
    trial.limit_ms = limit_ms
    trial.repair(_STEPS, changes=_CHANGES, pairs=_PAIRS)
    if trial.value_ms <= enough:
        return trial
    start = plan.copy()
    start.limit_ms = limit_ms
    trial = descended(start, plan.catalogue.is_efficient)
    after = trial.copy()
    after.repair(_STEPS, changes=_FEW_CHANGES, pairs=_PAIRS)
    best = min(trial, after, key=lambda each: each.value_ms)
    return best if best.value_ms <= enough else None
