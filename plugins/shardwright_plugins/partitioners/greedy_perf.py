"""greedy_perf: the longest shard first, onto the least loaded rank that has room."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np

from shardwright.contracts.partitioner import Partitioner
from shardwright.planning.options import FREE, NO_GANG, Floats, Ints
from shardwright.planning.placement import Misfit, ProposedShards


class GreedyPerf(Partitioner):
    """Longest processing time first (Graham 1969), within memory.

    Shards with a rank of their own are placed first; then the rest, longest first. A gang, whose shards must share a
    host, is as long as its longest shard, and goes to the host where the most loaded of the ranks that it takes is
    least loaded. If something is left without room, largest first is tried.
    """

    name: ClassVar[str] = "greedy_perf"
    preference: ClassVar[int] = 10

    def place(self, shards: ProposedShards) -> Ints | Misfit:
        """The rank of each shard, or which one did not fit."""
        misfit = shards.fixed_misfit()
        if misfit is not None:
            return misfit
        placed = _place(shards, _units(shards, shards.cost_ms))
        if isinstance(placed, Misfit):
            share = (shards.memory_bytes / np.maximum(shards.capacity_bytes.max(axis=0), 1)).max(axis=1)
            again = _place(shards, _units(shards, share))
            return placed if isinstance(again, Misfit) else again
        return placed


def _units(shards: ProposedShards, length: Floats) -> list[list[int]]:
    """What is placed together, the longest first: free shards on their own, and gangs, their longest shards first."""
    free = np.flatnonzero(~shards.is_fixed)
    longest_first = free[np.argsort(-length[free], kind="stable")]
    gangs: dict[int, list[int]] = {}
    units = []
    for shard, gang in zip(longest_first.tolist(), shards.gang[longest_first].tolist(), strict=True):
        if gang == NO_GANG:
            units.append([shard])
        elif gang in gangs:
            gangs[gang].append(shard)
        else:
            units.append(gangs.setdefault(gang, [shard]))
    return units


def _place(shards: ProposedShards, units: Sequence[list[int]]) -> Ints | Misfit:
    """Each unit, in order, where loads stay least and there is room (the lowest of equal ranks)."""
    ranks = shards.rank.copy()
    state = _Ranks(shards)
    is_gang = (shards.gang != NO_GANG).tolist()
    for unit in units:
        taken = state.place_gang(unit) if is_gang[unit[0]] else state.place_shard(unit[0])
        if isinstance(taken, Misfit):
            return taken
        ranks[unit] = taken
    return ranks


class _Ranks:
    """What the ranks hold while shards are placed. Plain lists: there are few ranks, and many small steps."""

    def __init__(self, shards: ProposedShards) -> None:
        self._shards = shards
        fixed = np.flatnonzero(shards.is_fixed)
        used = np.zeros_like(shards.capacity_bytes)
        np.add.at(used, shards.rank[fixed], shards.memory_bytes[fixed])
        self._room: list[list[int]] = (shards.capacity_bytes - used).tolist()
        self._loads: list[float] = np.bincount(
            shards.rank[fixed], weights=shards.cost_ms[fixed], minlength=shards.world_size
        ).tolist()
        self._needs, self._costs = shards.memory_bytes.tolist(), shards.cost_ms.tolist()
        self._local_rank = shards.local_rank.tolist()
        # Every rank with its load; entries with a load that a rank no longer has are passed over.
        self._heap = [(load, rank) for rank, load in enumerate(self._loads)]
        heapq.heapify(self._heap)

    def place_shard(self, shard: int) -> list[int] | Misfit:
        """Take room for a shard on the least loaded rank that has it."""
        need, passed = self._needs[shard], []
        chosen: int | None = None
        while self._heap and chosen is None:
            load, rank = heapq.heappop(self._heap)
            if load != self._loads[rank]:
                continue
            left = _left(self._room[rank], need)
            if left is None:
                passed.append((load, rank))
            else:
                chosen = rank
                self._take(rank, load + self._costs[shard], left)
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return self._misfit(shard, self._room) if chosen is None else [chosen]

    def place_gang(self, members: Sequence[int]) -> list[int] | Misfit:
        """Take room for a gang on the host where the most loaded of the ranks it takes is least loaded."""
        best: _HostFit | None = None
        for host in range(self._shards.num_hosts):
            fit = self._fit(members, host)
            if fit.stuck is None and (best is None or fit.largest_ms < best.largest_ms):
                best = fit
        if best is None:
            return self._gang_misfit(members)
        for rank in dict.fromkeys(best.ranks):
            local = rank - best.first
            self._take(rank, best.loads[local], best.room[local])
        return best.ranks

    def _fit(self, members: Sequence[int], host: int) -> _HostFit:
        fit = _HostFit(self._shards.ranks_of(host), self._loads, self._room)
        for shard in members:
            if not fit.add(self._needs[shard], self._costs[shard], self._local_rank[shard]):
                fit.stuck = shard
                break
        return fit

    def _take(self, rank: int, load: float, room: list[int]) -> None:
        self._loads[rank], self._room[rank] = load, room
        heapq.heappush(self._heap, (load, rank))

    def _gang_misfit(self, members: Sequence[int]) -> Misfit:
        """Why a gang fits on no host: what is missing on the one that came nearest."""
        misfits = []
        for host in range(self._shards.num_hosts):
            fit = self._fit(members, host)
            assert fit.stuck is not None  # no host had room
            room = list(self._room)
            room[fit.first : fit.first + len(fit.room)] = fit.room
            misfits.append(self._misfit(fit.stuck, room, host=host))
        return min(misfits, key=lambda misfit: misfit.short_bytes)

    def _misfit(self, shard: int, room: list[list[int]], *, host: int | None = None) -> Misfit:
        return self._shards.misfit(shard, self._shards.capacity_bytes - np.array(room), host=host)


class _HostFit:
    """A gang on a host, on trial."""

    def __init__(self, ranks: range, loads: Sequence[float], room: Sequence[list[int]]) -> None:
        self.first = ranks.start
        self.loads = list(loads[ranks.start : ranks.stop])
        self.room = list(room[ranks.start : ranks.stop])
        self.ranks: list[int] = []
        self.largest_ms = 0.0
        self.stuck: int | None = None

    def add(self, need: list[int], cost: float, local_rank: int) -> bool:
        """Put a shard on its rank of the host, or on the least loaded with room; whether there was room."""
        candidates: Iterable[int] = (local_rank,)
        if local_rank == FREE:
            candidates = sorted(range(len(self.loads)), key=self.loads.__getitem__)
        for local in candidates:
            left = _left(self.room[local], need)
            if left is not None:
                self.room[local] = left
                self.loads[local] += cost
                self.largest_ms = max(self.largest_ms, self.loads[local])
                self.ranks.append(self.first + local)
                return True
        return False


def _left(room: list[int], need: list[int]) -> list[int] | None:
    """What is left of a rank's room, or ``None`` if it is too little."""
    left = [have - want for have, want in zip(room, need, strict=True)]
    return left if min(left) >= 0 else None
