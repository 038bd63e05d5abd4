"""greedy_perf: the longest shard first, onto the least loaded rank that has room."""

from __future__ import annotations

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
    """Room and load of the ranks while shards are placed."""

    def __init__(self, shards: ProposedShards) -> None:
        self._shards = shards
        fixed = np.flatnonzero(shards.is_fixed)
        own = shards.rank[fixed]
        self._room: Ints = shards.capacity_bytes - shards.fixed_bytes
        np.subtract.at(self._room, own, shards.memory_bytes[fixed])
        self._loads: Floats = shards.fixed_ms.copy()
        np.add.at(self._loads, own, shards.class_ms[fixed, shards.rank_class[own]])
        self._local_rank = shards.local_rank.tolist()

    def place_shard(self, shard: int) -> list[int] | Misfit:
        """Take room for a shard on the rank that has it and would be least loaded."""
        left = self._room - self._shards.memory_bytes[shard]
        loads = self._loads + self._shards.class_ms[shard][self._shards.rank_class]
        loads[(left < 0).any(axis=1)] = np.inf
        chosen = int(loads.argmin())
        if loads[chosen] == np.inf:
            return self._misfit(shard, self._room)
        self._loads[chosen], self._room[chosen] = loads[chosen], left[chosen]
        return [chosen]

    def place_gang(self, members: Sequence[int]) -> list[int] | Misfit:
        """Take room for a gang on the host where the most loaded of the ranks it takes is least loaded."""
        trial = _GangTrial(self._shards, self._loads, self._room)
        for step in _steps(members, self._local_rank):
            trial.add(step)
        if len(trial.stuck) == self._shards.num_hosts:
            return min(
                (self._misfit(shard, room, host=host) for host, (shard, room) in sorted(trial.stuck.items())),
                key=lambda misfit: misfit.short_bytes,
            )
        host = trial.best_host()
        ranks = [trial.rank_of(host, shard) for shard in members]
        self._loads[ranks] = trial.loads.flat[ranks]
        self._room[ranks] = trial.room.reshape(self._room.shape)[ranks]
        return ranks

    def _misfit(self, shard: int, room: Ints, *, host: int | None = None) -> Misfit:
        return self._shards.misfit(shard, self._shards.capacity_bytes - room, host=host)


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
