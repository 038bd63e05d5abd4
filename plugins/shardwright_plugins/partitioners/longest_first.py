"""longest_first: the longest shard first, then moves and swaps between ranks as long as they help."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from shardwright.contracts.partitioner import Partitioner
from shardwright.planning.arrays import FREE, NO_GANG, Floats, Ints
from shardwright.planning.search.placement import Misfit, ProposedShards
from shardwright.planning.watch import Watch
from shardwright_plugins.partitioners.greedy_perf import GreedyPerf
from shardwright_plugins.proposers.proving.packing.bins import SLACK, Bins, largest

_STEPS, _BISECTIONS = 400, 8


class LongestFirst(Partitioner):
    """Longest processing time first (Graham 1969), within memory, and then repaired.

    The first placement is that of ``greedy_perf``, or, where it leaves a shard without room, one that fills the
    fullest dimension least and is repaired. Then the largest rank's time is bisected: shards are moved and swapped
    until no rank takes longer.
    """

    name: ClassVar[str] = "longest_first"
    preference: ClassVar[int] = 20

    def place(self, shards: ProposedShards) -> Ints | Misfit:
        """The rank of each shard, or which one did not fit."""
        misfit = shards.fixed_misfit()
        if misfit is not None:
            return misfit
        first = GreedyPerf().place(shards)
        bins = _filled(shards) if isinstance(first, Misfit) else _placed(shards, first)
        if not _has_room(bins):
            return first
        return _bisected(shards, bins)


def as_bins(shards: ProposedShards, limit_ms: float = np.inf) -> Bins:
    """Shards to be placed, and ranks, as items and bins; shards with a rank are in theirs."""
    bins = Bins.of(shards, limit_ms, _kinds(shards), Watch())
    for item in np.flatnonzero(shards.is_fixed).tolist():
        bins.put(item, int(shards.rank[item]))
        bins.pin(item)
    return bins


def _kinds(shards: ProposedShards) -> Ints:
    """Equal numbers for equal shards, members of gangs apart from others: ``[N]``."""
    is_alone = (shards.gang == NO_GANG)[:, None]
    columns = np.hstack([shards.class_ms, shards.memory_bytes, is_alone])
    return np.unique(columns, axis=0, return_inverse=True)[1].reshape(-1) if len(columns) else shards.shard


def _weight(bins: Bins, limit_ms: float) -> Floats:
    most = largest(bins.limit, bins.num_classes)
    most[: bins.num_classes] = limit_ms
    weight: Floats = (bins.size / most).max(axis=1)
    return weight


def _filled(shards: ProposedShards) -> Bins:
    """Every shard somewhere, memory exceeded or not, with no rank much fuller than others."""
    mean = (shards.fixed_ms.sum() + shards.cost_ms.sum()) / shards.world_size
    bins = as_bins(shards, limit_ms=max(4 * mean, 1e-12))
    bins.fill(_weight(bins, max(4 * mean, 1e-12)))
    return bins


def _placed(shards: ProposedShards, ranks: Ints) -> Bins:
    bins = as_bins(shards)
    for item in np.flatnonzero(bins.bin == FREE).tolist():
        bins.put(item, int(ranks[item]))
    return bins


def _has_room(bins: Bins) -> bool:
    """Bring all within memory, whatever the time: by moves and swaps."""
    if (bins.used.sum(axis=0) > bins.limit.sum(axis=0) * (1 + SLACK))[bins.num_classes :].any():
        return False  # whatever is moved
    return _repaired(bins, np.inf) or bins.repair(5 * _STEPS)


def _repaired(bins: Bins, limit_ms: float) -> bool:
    bins.within(limit_ms)
    return bins.repair(_STEPS)


def _bisected(shards: ProposedShards, bins: Bins) -> Ints:
    """The ranks of the least largest time that repair reaches."""
    best, best_ms = bins.bin.copy(), float(bins.time_ms.max())
    # No placement is below the mean load were all ranks the fastest, nor below the load that a rank has already.
    fastest = bins.used[:, : bins.num_classes].min(axis=1)
    low = max(float(fastest.mean()), float(shards.fixed_ms.max()))
    for _ in range(_BISECTIONS):
        if best_ms <= low * (1 + 1e-3):
            break
        # Within the middle time: repaired, it is the new best; else the search goes on above it.
        middle = (low + best_ms) / 2
        trial = bins.copy()
        if _repaired(trial, middle):
            bins, best, best_ms = trial, trial.bin.copy(), float(trial.time_ms.max())
        else:
            low = middle
    return best
