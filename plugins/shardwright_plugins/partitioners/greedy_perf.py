"""greedy_perf: the longest shard first, onto the least loaded rank that has room."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from shardwright.contracts.partitioner import Partitioner
from shardwright.planning.arrays import FREE, NO_GANG, Floats, Ints
from shardwright.planning.search.placement import Misfit, ProposedShards


class GreedyPerf(Partitioner):
    """Longest processing time first (Graham 1969), within memory.

    Shards with a rank of their own are placed first; then the rest, longest first. Where ranks are of unlike speed, the
    rank counts that would then be least loaded (Graham's rule on related machines). A gang, whose shards must share a
    host, is as long as its longest shard, and goes to the host where the most loaded of the ranks that it takes is
    least loaded. If something is left without room, largest first is tried.
    """

    name: ClassVar[str] = "greedy_perf"
    preference: ClassVar[int] = 0

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
    """Group shards that are placed together, the longest first: free shards on their own, and gangs."""
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
    """Room and load of the ranks while shards are placed. Plain lists: there are few ranks, and many small steps."""

    def __init__(self, shards: ProposedShards) -> None:
        self._shards = shards
        fixed = np.flatnonzero(shards.is_fixed)
        used = shards.fixed_bytes.copy()
        np.add.at(used, shards.rank[fixed], shards.memory_bytes[fixed])
        self._room: list[list[int]] = (shards.capacity_bytes - used).tolist()
        loads, own = shards.fixed_ms.copy(), shards.rank[fixed]
        np.add.at(loads, own, shards.class_ms[fixed, shards.rank_class[own]])
        self._loads: list[float] = loads.tolist()
        self._needs, self._costs = shards.memory_bytes.tolist(), shards.class_ms.tolist()
        self._class = shards.rank_class.tolist()
        self._local_rank = shards.local_rank.tolist()
        # Gangs are tried on all hosts at once, on arrays that are kept in step with the lists.
        self._has_gangs = bool((shards.gang != NO_GANG).any())
        self._load_array, self._room_array = np.array(self._loads), np.array(self._room, dtype=np.int64)
        # Of each class every rank with its load; entries with a load that a rank no longer has are passed over.
        self._heaps: list[list[tuple[float, int]]] = [[] for _ in range(shards.class_ms.shape[1])]
        for rank, load in enumerate(self._loads):
            heapq.heappush(self._heaps[self._class[rank]], (load, rank))

    def place_shard(self, shard: int) -> list[int] | Misfit:
        """Take room for a shard on the rank that has it and would be least loaded."""
        need, best = self._needs[shard], (np.inf, -1)
        for heap, cost in zip(self._heaps, self._costs[shard], strict=True):
            load, rank = self._least_loaded(heap, need)
            best = min(best, (load + cost, rank))
        load, chosen = best
        if chosen < 0:
            return self._misfit(shard, self._room)
        self._take(chosen, load, [have - want for have, want in zip(self._room[chosen], need, strict=True)])
        return [chosen]

    def _least_loaded(self, heap: list[tuple[float, int]], need: list[int]) -> tuple[float, int]:
        """The load of the least loaded rank of a class that has room, and that rank; infinite and -1 if none has."""
        passed, found = [], (np.inf, -1)
        while heap:
            load, rank = heap[0]
            if load == self._loads[rank]:
                if all(have >= want for have, want in zip(self._room[rank], need, strict=True)):
                    found = load, rank
                    break
                passed.append((load, rank))
            heapq.heappop(heap)
        for entry in passed:
            heapq.heappush(heap, entry)
        return found

    def place_gang(self, members: Sequence[int]) -> list[int] | Misfit:
        """Take room for a gang on the host where the most loaded of the ranks it takes is least loaded."""
        trial = _GangTrial(self._shards, self._load_array, self._room_array)
        for step in _steps(members, self._local_rank):
            trial.add(step)
        if len(trial.stuck) == self._shards.num_hosts:
            return min(
                (self._misfit(shard, room, host=host) for host, (shard, room) in sorted(trial.stuck.items())),
                key=lambda misfit: misfit.short_bytes,
            )
        host = trial.best_host()
        ranks = [trial.rank_of(host, shard) for shard in members]
        for rank in dict.fromkeys(ranks):
            self._take(
                rank, float(trial.loads.flat[rank]), trial.room.reshape(len(self._room), -1)[rank].tolist()
            )
        return ranks

    def _take(self, rank: int, load: float, room: list[int]) -> None:
        self._loads[rank], self._room[rank] = load, room
        if self._has_gangs:
            self._load_array[rank], self._room_array[rank] = load, room
        heapq.heappush(self._heaps[self._class[rank]], (load, rank))

    def _misfit(self, shard: int, room: Sequence[list[int]] | Ints, *, host: int | None = None) -> Misfit:
        return self._shards.misfit(shard, self._shards.capacity_bytes - np.array(room), host=host)


def _steps(members: Sequence[int], local_rank: Sequence[int]) -> list[list[int]]:
    """The members of a gang, those with a rank inside their host first: together, as long as their ranks differ."""
    places = [local_rank[shard] for shard in members]
    pinned = [shard for shard, place in zip(members, places, strict=True) if place != FREE]
    free = [[shard] for shard, place in zip(members, places, strict=True) if place == FREE]
    if len({local_rank[shard] for shard in pinned}) == len(pinned):
        return ([pinned] if pinned else []) + free
    return [[shard] for shard in pinned] + free


class _GangTrial:
    """A gang on every host at once, on trial. Legend: H hosts, L ranks of each, M tiers, K shards of a step."""

    def __init__(self, shards: ProposedShards, loads_ms: Floats, room_bytes: Ints) -> None:
        self._shards = shards
        size = (shards.num_hosts, shards.local_world_size)
        self.loads: Floats = loads_ms.reshape(size).copy()
        self.room: Ints = room_bytes.reshape(*size, -1).copy()
        self.stuck: dict[int, tuple[int, Ints]] = {}
        """Hosts without room: the shard that had none there, and what was left of all ranks, ``[W, M]``."""
        self._largest_ms = np.zeros(size[0])
        self._hosts = np.arange(size[0])[:, None]
        self._class: Ints = shards.rank_class.reshape(size)
        self._columns: dict[int, Ints] = {}

    def add(self, step: list[int]) -> None:
        """Put shards on their ranks of each host, or one shard on the least loaded rank with room."""
        need = self._shards.memory_bytes[step]
        places: Ints = self._shards.local_rank[step]
        if places[0] == FREE:
            has_room = (self.room >= need).all(axis=2)
            # The rank with room that would be least loaded, on each host; where none has room, one that is noted as
            # stuck below.
            cost: Floats = self._shards.class_ms[step[0]]
            after = self.loads + (cost - cost.min())[self._class]
            columns = np.where(has_room, after, np.inf).argmin(axis=1)[:, None]
        else:
            columns = np.broadcast_to(places, (len(self._hosts), len(step)))
        left = self.room[self._hosts, columns] - need
        if left.min() < 0:
            self._note_stuck(step, left)
        self.room[self._hosts, columns] = left
        loads = (
            self.loads[self._hosts, columns] + self._shards.class_ms[step, self._class[self._hosts, columns]]
        )
        self.loads[self._hosts, columns] = loads
        np.maximum(self._largest_ms, loads.max(axis=1), out=self._largest_ms)
        self._columns.update((shard, columns[:, index]) for index, shard in enumerate(step))

    def _note_stuck(self, step: list[int], left: Ints) -> None:
        short = np.less(left.min(axis=2), 0)
        for host in np.flatnonzero(short.any(axis=1)).tolist():
            if host not in self.stuck:
                room = self.room.reshape(self._shards.world_size, -1).copy()
                self.stuck[host] = (step[int(np.argmax(short[host]))], room)
                self._largest_ms[host] = np.inf

    def best_host(self) -> int:
        """The host where the most loaded of the ranks taken is least loaded; the first of equal ones."""
        return int(np.argmin(self._largest_ms))

    def rank_of(self, host: int, shard: int) -> int:
        """The rank of a shard if the gang is on ``host``."""
        return host * self._shards.local_world_size + int(self._columns[shard][host])
