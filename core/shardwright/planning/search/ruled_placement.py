"""Placing shards within the rules on ranks, around any partitioner.

The shards that a rule is for are given ranks first, tables kept together as one, and the partitioner places all others
around them. Legend: N shards that may move, W ranks, M memory tiers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import attrs
import numpy as np
from attrs import frozen

from shardwright.contracts.partitioner import Partitioner
from shardwright.errors import PlanningError
from shardwright.planning.arrays import FREE, NO_GANG, Bools, Floats, Ints
from shardwright.planning.options.rank_rules import RankRules, some
from shardwright.planning.plugin_calls import calling, whole_numbers
from shardwright.planning.search.placement import Misfit, ProposedShards


def place_within(rules: RankRules | None, partitioner: Partitioner, shards: ProposedShards) -> Ints | Misfit:
    """Place shards by a partitioner, within the rules.

    Args:
        rules: may be none.
        partitioner: places all shards that no rule is for.
        shards: shards of a proposal, in the order of tables.

    Returns:
        The rank of each shard ``[N]``, or which did not fit.
    """
    concerned = np.isin(shards.table, sorted(rules.concerned if rules else ()))
    if rules is None or not concerned.any():
        return _placed_by(partitioner, shards)
    ruled = _placed_by_rules(rules, shards, np.flatnonzero(concerned))
    if isinstance(ruled, Misfit):
        return ruled
    rest = np.flatnonzero(~concerned)
    placed = _placed_by(partitioner, _around(shards, ruled, rest))
    if isinstance(placed, Misfit):
        return attrs.evolve(placed, shard=int(rest[placed.shard]))
    ranks = ruled.ranks.copy()
    ranks[rest] = placed
    return ranks


def _placed_by(partitioner: Partitioner, shards: ProposedShards) -> Ints | Misfit:
    """Ask a partitioner, and check that it answers with ranks or a misfit."""
    who = f"partitioner {partitioner.name!r}"
    with calling(who):
        placed = partitioner.place(shards)
    if isinstance(placed, Misfit):
        return placed
    ranks = whole_numbers(who, f"the ranks of {len(shards)} shards, or a Misfit", placed)
    if len(ranks) != len(shards):
        raise PlanningError(f"{who} broke its contract: it gave {len(ranks)} ranks for {len(shards)} shards")
    return ranks


def ruled_ranks(rules: RankRules, shards: ProposedShards) -> Ints | Misfit:
    """The ranks of the shards that a rule is for, ``FREE`` for all others ``[N]``, or which did not fit."""
    ruled = _placed_by_rules(rules, shards, np.flatnonzero(np.isin(shards.table, sorted(rules.concerned))))
    return ruled if isinstance(ruled, Misfit) else ruled.ranks


def _around(shards: ProposedShards, ruled: _RuledRanks, rest: Ints) -> ProposedShards:
    """The shards that no rule is for, with the others as shards that must live where they are."""
    columns = ("shard", "table", "cost_ms", "memory_bytes", "rank", "gang", "local_rank")
    return attrs.evolve(
        shards,
        fixed_ms=ruled.loads,
        fixed_bytes=shards.capacity_bytes - ruled.room,
        **{name: getattr(shards, name)[rest] for name in columns},
    )


def broken_rule(rules: RankRules | None, shards: ProposedShards, ranks: Ints) -> str:
    """Name the rule that a placement of shards that may move breaks; empty if none."""
    return rules.broken(_ranks_of_tables(shards, ranks)) if rules else ""


def _ranks_of_tables(shards: ProposedShards, ranks: Ints) -> dict[int, set[int]]:
    used: dict[int, set[int]] = {}
    for table, rank in np.unique(np.stack([shards.table, ranks]), axis=1).T.tolist():
        used.setdefault(table, set()).add(rank)
    return used


@frozen(eq=False)
class _Unit:
    """Shards that get their ranks in one go: tables kept together, a gang, or a shard alone."""

    table: int
    shards: tuple[int, ...]
    is_gang: bool


def _placed_by_rules(rules: RankRules, shards: ProposedShards, free: Ints) -> _RuledRanks | Misfit:
    """The ranks once the shards of ``free`` have been given theirs.

    Tables with the fewest ranks to choose from come first, the longest of these first. If that fails, the largest come
    first, and the shards of a table stay on the ranks that it has already.
    """
    units = _units(rules, shards, free)
    share = (shards.memory_bytes / np.maximum(shards.capacity_bytes.max(axis=0), 1)).max(axis=1)
    first: Misfit | None = None
    for length, is_compact in ((shards.cost_ms, False), (share, True)):
        ruled = _RuledRanks(rules, shards, is_compact=is_compact)
        misfit = ruled.fill(sorted(units, key=partial(_priority, rules, length)))
        if misfit is None:
            return ruled
        first = misfit if first is None else first
    assert first is not None  # two ways were tried
    return first


def _priority(rules: RankRules, length: Floats, unit: _Unit) -> tuple[int, float, int]:
    return (int(rules.masks[unit.table].sum()), -float(length[list(unit.shards)].sum()), unit.shards[0])


def _units(rules: RankRules, shards: ProposedShards, free: Ints) -> list[_Unit]:
    found: dict[tuple[str, int], list[int]] = {}
    for shard in free.tolist():
        table, gang = int(shards.table[shard]), int(shards.gang[shard])
        group = rules.together.get(table)
        key = ("together", group[0]) if group else ("shard", shard) if gang == NO_GANG else ("gang", gang)
        found.setdefault(key, []).append(shard)
    return [
        _Unit(int(shards.table[members[0]]), tuple(members), kind == "gang")
        for (kind, _), members in found.items()
    ]


class _RuledRanks:
    """Loads and users of the ranks while the shards under rules get theirs."""

    def __init__(self, rules: RankRules, shards: ProposedShards, *, is_compact: bool) -> None:
        self._rules, self._shards, self._is_compact = rules, shards, is_compact
        self.ranks: Ints = np.full(len(shards), FREE)
        self.loads: Floats = shards.fixed_ms.copy()
        self.room: Ints = shards.capacity_bytes - shards.fixed_bytes
        self._users: list[set[int]] = [set() for _ in range(shards.world_size)]

    def fill(self, units: Sequence[_Unit]) -> Misfit | None:
        """Give all units ranks, or say which found none."""
        for unit in units:
            open_ranks = self._open_ranks(unit)
            taken = self._host_ranks(unit, open_ranks) if unit.is_gang else self._one_rank(unit, open_ranks)
            if taken is None:
                return self._misfit(unit, open_ranks)
            for shard, rank in taken.items():
                self._take(shard, rank)
        return None

    def _open_ranks(self, unit: _Unit) -> Bools:
        """The ranks that the rules leave to a unit, as the tables lie now: ``[W]``."""
        members = {int(self._shards.table[shard]) for shard in unit.shards}
        rivals = frozenset[int]().union(*(self._rules.rivals.get(member, ()) for member in members))
        mask = self._rules.masks[unit.table]
        return mask & np.array([not users & rivals for users in self._users]) if rivals else mask

    def _one_rank(self, unit: _Unit, open_ranks: Bools) -> dict[int, int] | None:
        """The least loaded open rank with room for all of a unit; one its table has already, if that is asked."""
        need = self._shards.memory_bytes[list(unit.shards)].sum(axis=0)
        fits = open_ranks & (self.room >= need).all(axis=1)
        own = fits & np.array([unit.table in users for users in self._users])
        fits = own if self._is_compact and own.any() else fits
        if not fits.any():
            return None
        rank = int(np.argmin(np.where(fits, self.loads, np.inf)))
        return dict.fromkeys(unit.shards, rank)

    def _host_ranks(self, unit: _Unit, open_ranks: Bools) -> dict[int, int] | None:
        """Open ranks of the host where the most loaded of those taken is least loaded."""
        tried = [self._on_host(unit, open_ranks, host) for host in range(self._shards.num_hosts)]
        possible = [(load, ranks) for load, ranks in tried if ranks is not None]
        return min(possible, key=lambda pair: pair[0])[1] if possible else None

    def _on_host(self, unit: _Unit, open_ranks: Bools, host: int) -> tuple[float, dict[int, int] | None]:
        loads, room, taken = self.loads.copy(), self.room.copy(), dict[int, int]()
        for shard in unit.shards:
            ranks = np.array(self._shards.ranks_of(host))
            local = self._shards.local_rank[shard]
            ranks = ranks if local == FREE else ranks[[local]]
            fits = ranks[open_ranks[ranks] & (room[ranks] >= self._shards.memory_bytes[shard]).all(axis=1)]
            if not len(fits):
                return np.inf, None
            # Each shard of the gang goes to the least loaded rank of the host that has room.
            rank = int(fits[np.argmin(loads[fits])])
            loads[rank] += self._shards.cost_ms[shard]
            room[rank] -= self._shards.memory_bytes[shard]
            taken[shard] = rank
        return float(loads[list(taken.values())].max()), taken

    def _take(self, shard: int, rank: int) -> None:
        self.ranks[shard] = rank
        self.loads[rank] += self._shards.cost_ms[shard]
        self.room[rank] -= self._shards.memory_bytes[shard]
        self._users[rank].add(int(self._shards.table[shard]))

    def _misfit(self, unit: _Unit, open_ranks: Bools) -> Misfit:
        """The shortage on the open rank that came nearest; on any, where the rules leave none open."""
        need = self._shards.memory_bytes[list(unit.shards)].sum(axis=0)
        shard = max(unit.shards, key=lambda shard: int(self._shards.memory_bytes[shard].max()))
        ranks = np.flatnonzero(open_ranks) if open_ranks.any() else np.arange(len(open_ranks))
        short = (need - self.room)[ranks]
        rank, tier = (
            int(ranks[np.argmin(short.max(axis=1))]),
            int(np.argmax(short[np.argmin(short.max(axis=1))])),
        )
        return Misfit(
            table=unit.table,
            shard=shard,
            rank=rank,
            is_fixed=False,
            tier=self._shards.tiers[tier],
            needed_bytes=int(need[tier]),
            free_bytes=int(self.room[rank, tier]) if open_ranks.any() else 0,
            capacity_bytes=int(self._shards.capacity_bytes[rank, tier]),
            rule=self._why(unit),
        )

    def _why(self, unit: _Unit) -> str:
        """The rules that a unit is under, for an error."""
        rules, reasons = self._rules, []
        if unit.table in rules.ranks:
            reasons.append(f"it may use the ranks {some(sorted(rules.allowed(unit.table)))} only")
        if unit.table in rules.together:
            others = (t for t in rules.together[unit.table] if t != unit.table)
            reasons.append(f"it is kept together with {rules.names(others)}")
        for group in rules.apart:
            if unit.table in group:
                reasons.append(f"it is kept apart from {rules.names(t for t in group if t != unit.table)}")
        return "; ".join(reasons)
