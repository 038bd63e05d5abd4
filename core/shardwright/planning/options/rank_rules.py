"""Rules on ranks: which ranks a table may use, which tables are kept together on one, which apart.

A proof of a bound may leave them out: fewer plans keep the rules, so that a bound of all plans is one of these too, a
loose one where the rules cost time. Or it is about the tables that may use no ranks but some.

What places shards knows memory, and no rules: it keeps these as resources beside memory. A set of ranks that tables may
use is a resource of which other ranks have too little for one shard. Tables that are kept apart share a resource of
which each rank has enough for one shard.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
from attrs import field, frozen

from shardwright.arguments import some
from shardwright.errors import InvalidInputError, NoPlanError
from shardwright.planning.arrays import Bools, Ints
from shardwright.planning.layouts.layout import Layout
from shardwright.planning.machines.topology import Topology
from shardwright.planning.tables.constraints import Constraints
from shardwright.planning.tables.spec import TableSpec
from shardwright.planning.text import count_text

# What a shard takes of a resource, and what a rank has of it: too little for any, or enough for one. None has nothing,
# or is full with one shard, since resources are compared by the part that is taken.
NEED, TOO_LITTLE, _FOR_ONE = 2, 1, 3


@frozen(eq=False, slots=False)
class RankRules:
    """The rules of all tables.

    Args:
        topology: the ranks.
        tables: tables in the planner's order.
        ranks: table -> the ranks its shards may use, where not all.
        together: table -> the tables that share one rank with it, itself among them, in order.
        apart: the groups of tables of which no two may share a rank.
    """

    topology: Topology
    tables: tuple[TableSpec, ...]
    ranks: Mapping[int, frozenset[int]] = field(factory=dict)
    together: Mapping[int, tuple[int, ...]] = field(factory=dict)
    apart: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(
        cls, constraints: Constraints, tables: Sequence[TableSpec], topology: Topology
    ) -> RankRules | None:
        """The rules that ``constraints`` contain; ``None`` if there are none.

        Raises:
            InvalidInputError: a rank does not exist.
            NoPlanError: rules contradict each other; the text names the tables that they are for.
        """
        asked = ("ranks", "together", "apart")
        if all(getattr(rule, name) is None for rule in constraints.rules.values() for name in asked):
            return None
        rules = [constraints.of(table) for table in tables]
        for table, rule in zip(tables, rules, strict=True):
            if missing := [rank for rank in rule.ranks or () if rank >= topology.world_size]:
                raise InvalidInputError(
                    f"constraints for table {table.describe()}: ranks has {some(missing)}; the topology has "
                    f"{topology.world_size} ranks, 0 to {topology.world_size - 1}"
                )
        ranks = {index: frozenset(rule.ranks) for index, rule in enumerate(rules) if rule.ranks is not None}
        groups = _grouped([(rule.together,) if rule.together else () for rule in rules])
        together = {table: tuple(group) for group in groups for table in group if len(group) > 1}
        apart = tuple(
            tuple(group) for group in _grouped([rule.apart or () for rule in rules]) if len(group) > 1
        )
        found = cls(topology, tuple(tables), ranks, together, apart)
        for group in dict.fromkeys(together.values()):
            found._check_together(group)
        for group in apart:
            found._check_apart(group)
        return found

    def refusal(self, table: int, layout: Layout) -> str:
        """Explain why a layout cannot follow the rules for its table; empty if it can."""
        allowed, count = self.allowed(table), len(layout.blocks)
        if table in self.together and count > 1:
            others = self.names(other for other in self.together[table] if other != table)
            return f"has {count} blocks, and is kept together with {others} on one rank"
        fixed = {block.rank for block in layout.blocks if block.rank is not None}
        if not fixed <= allowed:
            return f"has blocks on the ranks {some(sorted(fixed - allowed))}, which 'ranks' does not allow"
        if table in self.rivals and fixed:
            return "has blocks that must live on given ranks, and is kept apart from other tables"
        gang_ranks = {block.local_rank for block in layout.blocks if block.local_rank is not None}
        hosts = range(0, self.topology.world_size, self.topology.local_world_size)
        if not any(allowed.issuperset(first + rank for rank in gang_ranks) for first in hosts):
            return "has blocks that share a host, and 'ranks' does not allow all of them on any"
        return ""

    def broken(self, used: Mapping[int, Collection[int]]) -> str:
        """Name the rule that is broken where tables use these ranks; empty if none is.

        Args:
            used: table -> the ranks of its shards; those of tables that no rule is for may be left out.
        """
        ranks = {table: frozenset(used.get(table, ())) for table in self.concerned}
        for table, allowed in self.ranks.items():
            if not ranks[table] <= allowed:
                return f"table {self.names([table])} has shards on ranks that 'ranks' does not allow"
        for group in dict.fromkeys(self.together.values()):
            if len(frozenset[int]().union(*(ranks[table] for table in group))) > 1:
                return f"tables {self.names(group)} are not together on one rank"
        for group in self.apart:
            taken = [rank for table in group for rank in ranks[table]]
            if len(taken) > len(set(taken)):
                return f"two of the tables {self.names(group)} share a rank"
        return ""

    @cached_property
    def rivals(self) -> frozenset[int]:
        """The tables that are kept apart from others."""
        return frozenset(table for group in self.apart for table in group)

    @property
    def concerned(self) -> frozenset[int]:
        """The tables that a rule is for."""
        return self.rivals | {*self.ranks, *self.together}

    @cached_property
    def masks(self) -> Mapping[int, Bools]:
        """Ranks that each table under a rule may use: ``[W]`` each; not those that tables kept apart from it need."""
        own = {table: self.allowed(table) for table in sorted(self.concerned)}
        members = [(group, table) for group in self.apart for table in group]
        is_new = True
        while is_new:
            is_new = False
            for group, table in members:
                full = own[table]
                others = [other for other in group if own[other] & full and not own[other] <= full]
                if others and sum(own[other] <= full for other in group) == len(full):
                    is_new = True
                    for other in others:
                        own |= dict.fromkeys(self.together.get(other, (other,)), own[other] - full)
        ranks = np.arange(self.topology.world_size)
        return {table: np.isin(ranks, sorted(allowed)) for table, allowed in own.items()}

    def resources(self, held: Mapping[int, Bools], num_shards: int) -> Iterator[tuple[tuple[int, ...], Ints]]:
        """The rules as resources.

        Args:
            held: table -> the ranks that it may use, ``[W]`` each.
            num_shards: number of shards that may take of a resource, or more.

        Returns:
            For each resource the tables of which a shard takes ``NEED``, and what each rank has: ``[W]``.
        """
        sets: dict[bytes, list[int]] = {}
        for table, mask in held.items():
            if not mask.all():
                sets.setdefault(mask.tobytes(), []).append(table)
        for tables in sets.values():
            yield tuple(tables), np.where(held[tables[0]], NEED * num_shards + 1, TOO_LITTLE)
        for group in self.apart:
            yield group, np.full(self.topology.world_size, _FOR_ONE)

    def allowed(self, table: int) -> frozenset[int]:
        """The ranks a table may use: those that it and all that are kept together with it may."""
        allowed = frozenset(range(self.topology.world_size))
        for member in self.together.get(table, (table,)):
            allowed &= self.ranks.get(member, allowed)
        return allowed

    def _check_together(self, group: tuple[int, ...]) -> None:
        if self.allowed(group[0]):
            return
        pins = "; ".join(
            f"{self.names([table])} to ranks {some(sorted(self.ranks[table]))}"
            for table in group
            if table in self.ranks
        )
        raise NoPlanError(
            f"constraints contradict each other: {self.names(group)} are kept together on one rank, and pinned to "
            f"ranks of which none is common: {pins}. Change one of them."
        )

    def _check_apart(self, group: tuple[int, ...]) -> None:
        for table in group:
            both = [other for other in self.together.get(table, ()) if other in group]
            if len(both) > 1:
                pair = self.names(both[:2])
                raise NoPlanError(
                    f"constraints contradict each other: {pair} are kept together on one rank, and apart. "
                    "Take one of them out of 'together' or out of 'apart'."
                )
        for ranks in dict.fromkeys(self.allowed(table) for table in group):
            crowded = [table for table in group if self.allowed(table) <= ranks]
            if len(crowded) > len(ranks):
                raise NoPlanError(
                    f"constraints contradict each other: {len(crowded)} tables, {self.names(crowded)}, are kept apart "
                    f"and may use {count_text(len(ranks), 'rank')} together ({some(sorted(ranks))}). Take one of them "
                    "out of 'apart', or allow more ranks."
                )

    def names(self, tables: Iterable[int]) -> str:
        """The paths of tables, for messages."""
        return some([self.tables[table].path for table in tables])


def _grouped(labels: Sequence[Sequence[str]]) -> list[list[int]]:
    """The tables of each label, in order."""
    groups: dict[str, list[int]] = {}
    for table, names in enumerate(labels):
        for name in names:
            groups.setdefault(name, []).append(table)
    return list(groups.values())
