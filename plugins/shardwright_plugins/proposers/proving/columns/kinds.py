"""Kinds of shards, and what options need of each: the rows of the program of patterns.

Legend: K kinds of shards, O' options, S runs of shards, D dimensions (time, then memory tiers).
"""

from __future__ import annotations

import numpy as np
from attrs import frozen

from shardwright.planning.arrays import FREE, NO_GANG, Bools, Floats, Ints
from shardwright.planning.options.search_space import SearchSpace

_ROUNDING = 1e-9


@frozen(eq=False)
class Kinds:
    """The kinds of shards that may go to any rank or host, and what options need of them.

    Args:
        options: the options: ``[O']``.
        table: the distinct table of each: ``[O']``.
        needs: shards of each kind: ``[K, O']``.
        size: load of a shard of each kind, in parts of what a rank has beside the spread load: ``[K, D]``.
        kind_of: the kind of each run, or -1: ``[S]``.
        is_gang: shards of this kind go to all ranks of a host: ``[K]``.
        spread: load of each option on every rank, in parts of all it has: ``[O', D]``.
        budget: largest spread load: ``[D]``.
    """

    options: Ints
    table: Ints
    needs: Floats
    size: Floats
    kind_of: Ints
    is_gang: Bools
    spread: Floats
    budget: Floats


def spread_of(space: SearchSpace, covers: Bools) -> Floats:
    """Compute the largest load of each option on every rank, time and memory: ``[O, D]``; 0 where it covers not all."""
    needs = np.column_stack([space.cost_ms, space.memory_bytes])
    return np.where(covers[:, None], np.maximum.reduceat(needs, space.options.first_shard[:-1]), 0.0)


def kinds_of(
    space: SearchSpace, allowed: Bools, spread: Floats, budget: Floats, limit_ms: float, most: int
) -> Kinds | None:
    """The kinds of shards of some options; ``None`` if there are too many, or no room beside the spread load.

    Args:
        space: options and costs.
        allowed: the options, which put one shard on every rank, or shards that have no rank: ``[O]``.
        spread: load of each option on every rank: ``[O, D]``.
        budget: the spread load at most: ``[D]``.
        limit_ms: the time.
        most: largest number of kinds.
    """
    options = space.options
    limit = np.append(limit_ms, space.capacity_bytes.min(axis=0))
    room = np.maximum(limit - budget, 0.0)
    needs, count = _needs(space)
    run = np.flatnonzero((options.rank == FREE) & allowed[options.option] & (count > 0))
    too_large = (needs[run] > room * (1 - _ROUNDING)).any(axis=1)
    usable = allowed.copy()
    usable[options.option[run[too_large]]] = False
    run, chosen = run[usable[options.option[run]]], np.flatnonzero(usable)
    has_option = np.bincount(options.table[chosen], minlength=len(options.tables)) > 0
    if room[0] <= 0 or not len(run) or not has_option.all():
        return None
    is_gang = options.gang[run] != NO_GANG
    distinct, kind = np.unique(np.column_stack([needs[run], is_gang]), axis=0, return_inverse=True)
    if len(distinct) > most:
        return None
    matrix = np.zeros((len(distinct), len(chosen)))
    np.add.at(matrix, (kind.reshape(-1), np.searchsorted(chosen, options.option[run])), count[run])
    kind_of = np.full(options.num_shards, -1)
    kind_of[run] = kind.reshape(-1)
    return Kinds(
        options=chosen,
        table=options.table[chosen],
        needs=matrix,
        size=distinct[:, :-1] / np.maximum(room, 1e-30),
        kind_of=kind_of,
        is_gang=distinct[:, -1] > 0,
        spread=spread[chosen] / np.maximum(limit, 1e-30),
        budget=budget / np.maximum(limit, 1e-30),
    )


def _needs(space: SearchSpace) -> tuple[Floats, Ints]:
    """Compute the load of each shard of a run, ``[S, D]``, and count these shards, ``[S]``.

    A gang takes as much of each rank as its largest shard, so all its shards are counted with its first run.
    """
    options = space.options
    needs, count = np.column_stack([space.cost_ms, space.memory_bytes]), options.count.copy()
    run = np.flatnonzero(options.gang != NO_GANG)
    if len(run):
        run = run[np.argsort(options.gang[run], kind="stable")]
        starts = np.flatnonzero(np.diff(options.gang[run], prepend=NO_GANG))
        total = np.add.reduceat(count[run], starts)
        count[run] = 0
        count[run[starts]] = total
        needs[run[starts]] = np.maximum.reduceat(needs[run], starts, axis=0)
    return needs, count
