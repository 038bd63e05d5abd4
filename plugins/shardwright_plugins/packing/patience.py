"""Packing what hardly fits: from several choices of options, other options and other ranks in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from shardwright.planning.options import Bools, Floats, Ints
from shardwright.planning.space import SearchSpace
from shardwright_plugins.packing.assignment import Assignment, Catalogue
from shardwright_plugins.packing.neighbourhoods import repaired
from shardwright_plugins.packing.regrouping import regroup
from shardwright_plugins.packing.sharing import share_out

# Of one turn: tables taken out and put back, ranks shared out anew (so many more with each turn), and, for a plan that
# is near, groups of ranks packed anew.
_REBUILDS, _SHARINGS, _REGROUPS = 40, 200, 400
# Choices of options to begin with, turns of each, and of the one that came nearest.
_STARTS, _TURNS, _LAST_TURNS = 8, 4, 12
# Starts of which one short turn is tried, with fewer groups packed anew.
_FEW_STARTS, _FEW_REGROUPS = 2, 50
# A start is given up that is over by more than this, divided by its turns, in ranks.
_HOPELESS = 0.3
# A solver shares out groups of ranks of a plan that is over by no more, so often at once; and of the nearest one.
_NEAR, _ROUNDS, _LAST_ROUNDS = 0.1, 10, 40
# Moves, swaps and sharings before the first turn, and options changed.
_STEPS, _CHANGES, _PAIRS = 200, 30, 4
# The largest part of tables cut finely in a mixed start, and what a large shard counts beside its table's memory.
_MOST_FINE, _LUMP = 0.4, 0.05
# More than any option takes, in parts of all memory.
_UNWANTED = 1e6


def packed(
    catalogue: Catalogue, proposal: Ints, limit_ms: float, is_over: Callable[[], bool]
) -> Assignment | None:
    """A plan within all memories, if patience finds one, or what came nearest.

    Either options or ranks alone get stuck where little room is left: the options that need least do not go together,
    or the ranks that were chosen leave room in many places where it is needed in one. And which tables must be cut
    finely, so that the lumps of others go in, no price tells: hence several starts, the same on any machine.

    Args:
        catalogue: of the space.
        proposal: options that fit in memory as a whole: ``[A]``.
        limit_ms: the time that no rank should exceed.
        is_over: whether to end.
    """
    nearest: Assignment | None = None
    for start in _starts(catalogue.space, proposal):
        trial = _begun(catalogue, start, limit_ms)
        if turned(trial, range(_TURNS), is_over, hopeless=_HOPELESS):
            return trial
        if _over(trial) < _NEAR and not is_over():
            trial = repaired(catalogue, trial, _ROUNDS, is_over)
        if nearest is None or _over(trial) < _over(nearest):
            nearest = trial
        if np.isfinite(trial.value_ms) or is_over():
            break
    if nearest is None or np.isfinite(nearest.value_ms) or is_over():
        return nearest
    nearest = repaired(catalogue, nearest, _LAST_ROUNDS, is_over)
    if not np.isfinite(nearest.value_ms):
        turned(nearest, range(_TURNS, _LAST_TURNS), is_over)
    return nearest


def packed_soon(
    catalogue: Catalogue, proposal: Ints, limit_ms: float, is_over: Callable[[], bool]
) -> Assignment | None:
    """A plan within all memories by a short turn of patience, about a second; arguments as for :func:`packed`."""
    for start in islice(_starts(catalogue.space, proposal), _FEW_STARTS):
        if is_over():
            return None
        trial = _begun(catalogue, start, limit_ms)
        if _changed(trial, 0) or (_over(trial) < _NEAR and regroup(trial.bins, _FEW_REGROUPS)):
            return trial
    return None


def _begun(catalogue: Catalogue, start: Ints, limit_ms: float) -> Assignment:
    """A start's shards put where there is room, with a little repair."""
    trial = Assignment(catalogue, start, limit_ms)
    trial.fill()
    trial.repair(_STEPS, changes=_CHANGES, pairs=_PAIRS)
    return trial


def _over(plan: Assignment) -> float:
    """By how much all ranks together are over their limits, in parts of these."""
    return float(plan.bins.over().sum())


def turned(trial: Assignment, turns: range, is_over: Callable[[], bool], *, hopeless: float = np.inf) -> bool:
    """Change options and ranks in turn as long as something is over a limit; whether nothing is any more.

    Args:
        trial: the plan.
        turns: their numbers: later ones are longer, and draw by chance otherwise.
        is_over: whether to end.
        hopeless: what may be over after the first turn, in ranks; after the second, half of it, and so on.
    """
    for turn in turns:
        if _changed(trial, turn):
            return True
        if is_over() or _over(trial) > hopeless / (1 + turn):
            return False
        if _over(trial) < _NEAR and regroup(trial.bins, _REGROUPS, seed=turn):
            return True
    return False


def _changed(trial: Assignment, turn: int) -> bool:
    """Change options, then ranks; whether nothing is over a limit any more."""
    if trial.rebuild(_REBUILDS, trial.space.total_cost_ms, seed=turn):
        return True
    return share_out(trial.bins, _SHARINGS * (1 + turn), seed=turn)


def _starts(space: SearchSpace, proposal: Ints) -> Iterator[Ints]:
    """Choices of options: as given, every table in one place, every one cut finely, and with some so by chance."""
    fine = _finest(space, space.fits_alone)
    yield proposal
    yield _finest(space, space.fits_alone & ~space.bound.problem.covers)
    yield fine
    random = np.random.default_rng(0)
    for _ in range(_STARTS - 3):
        part = random.uniform(0, _MOST_FINE)
        yield np.where(random.random(len(proposal)) < part, fine, proposal)


def _finest(space: SearchSpace, wanted: Bools) -> Ints:
    """The option of each table that takes least memory, of about equal ones that with the smallest shards: ``[A]``.

    Args:
        space: options and memory.
        wanted: options that come before others: ``[O]``.
    """
    options, have = space.options, np.maximum(space.capacity_bytes.sum(axis=0), 1)
    parts: Floats = ((space.total_bytes + _LUMP * space.largest_bytes) / have).sum(axis=1)
    parts = np.where(wanted, parts, np.where(space.fits_alone, parts + _UNWANTED, np.inf))
    mine = (np.array(options.of_table(table)) for table in range(len(options.tables)))
    return np.array([own[np.argmin(parts[own])] for own in mine], dtype=np.int64)[options.alike]
