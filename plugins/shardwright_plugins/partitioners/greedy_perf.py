"""greedy_perf: the longest shard first, onto the least loaded rank that has room."""

from __future__ import annotations

import heapq
from typing import ClassVar

import numpy as np

from shardwright.contracts.partitioner import Partitioner
from shardwright.planning.options import Ints
from shardwright.planning.placement import Misfit, ProposedShards


class GreedyPerf(Partitioner):
    """Longest processing time first (Graham 1969), within memory.

    Shards with a rank of their own are placed first. If some shard is left without room, largest first is
    tried.
    """

    name: ClassVar[str] = "greedy_perf"
    preference: ClassVar[int] = 10

    def place(self, shards: ProposedShards) -> Ints | Misfit:
        """The rank of each shard, or which one did not fit."""
        misfit = shards.fixed_misfit()
        if misfit is not None:
            return misfit
        fixed = np.flatnonzero(shards.is_fixed)
        used = np.zeros_like(shards.capacity_bytes)
        np.add.at(used, shards.rank[fixed], shards.memory_bytes[fixed])
        free = np.flatnonzero(~shards.is_fixed)
        longest_first = free[np.argsort(-shards.cost_ms[free], kind="stable")]
        placed = _place(shards, longest_first, used)
        if isinstance(placed, Misfit):
            share = (shards.memory_bytes / np.maximum(shards.capacity_bytes.max(axis=0), 1)).max(axis=1)
            largest_first = free[np.argsort(-share[free], kind="stable")]
            again = _place(shards, largest_first, used)
            return placed if isinstance(again, Misfit) else again
        return placed


def _place(shards: ProposedShards, order: Ints, fixed_bytes: Ints) -> Ints | Misfit:
    """Each free shard, in ``order``, onto the least loaded rank with room (the lowest of equal ones)."""
    ranks = shards.rank.copy()
    fixed = shards.is_fixed
    loads = np.bincount(shards.rank[fixed], weights=shards.cost_ms[fixed], minlength=shards.world_size)
    heap = [(load, rank) for rank, load in enumerate(loads.tolist())]
    heapq.heapify(heap)
    room = (shards.capacity_bytes - fixed_bytes).tolist()
    needs, costs = shards.memory_bytes.tolist(), shards.cost_ms.tolist()
    for shard in order.tolist():
        rank = _take_rank(heap, room, needs[shard], costs[shard])
        if rank is None:
            return shards.misfit(shard, shards.capacity_bytes - np.array(room))
        ranks[shard] = rank
    return ranks


def _take_rank(
    heap: list[tuple[float, int]], room: list[list[int]], need: list[int], cost: float
) -> int | None:
    """Take room for a shard on the least loaded rank that has it."""
    passed = []
    chosen = None
    while heap and chosen is None:
        load, rank = heapq.heappop(heap)
        left = [have - want for have, want in zip(room[rank], need, strict=True)]
        if min(left) >= 0:
            chosen, room[rank] = rank, left
            load += cost
        passed.append((load, rank))
    for entry in passed:
        heapq.heappush(heap, entry)
    return chosen
