"""Placing shards within the rules on ranks, by any partitioner: it sees rules as fixed ranks and as resources.

Tables kept together are one shard. A shard that may use one rank only is fixed there. Legend: N shards that may move,
U units of shards that get one rank, W ranks, M memory tiers.
"""

from __future__ import annotations

from collections.abc import Container

import attrs
import numpy as np

from shardwright.contracts.partitioner import Partitioner
from shardwright.errors import PlanningError
from shardwright.planning.arrays import NO_GANG, Ints
from shardwright.planning.options.rank_rules import NEED, RankRules
from shardwright.planning.plugin_calls import calling, whole_numbers
from shardwright.planning.search.placement import Misfit, ProposedShards


def place_within(rules: RankRules | None, partitioner: Partitioner, shards: ProposedShards) -> Ints | Misfit:
    """Place shards by a partitioner, within the rules.

    Args:
        rules: may be none.
        partitioner: places the shards.
        shards: shards of a proposal, in the order of tables.

    Returns:
        The rank of each shard ``[N]``, or which did not fit.
    """
    if rules is None:
        return _placed_by(partitioner, shards)
    first = _placed_units(rules, partitioner, shards, _units(rules, shards))
    if isinstance(first, Misfit) and rules.apart:
        # Each shard on a rank of its own, a table may leave too few ranks to those that it is kept apart from.
        again = _placed_units(rules, partitioner, shards, _units(rules, shards, rules.rivals))
        return first if isinstance(again, Misfit) else again
    return first


def broken_rule(rules: RankRules | None, shards: ProposedShards, ranks: Ints) -> str:
    """Name the rule that a placement of shards that may move breaks; empty if none."""
    used: dict[int, set[int]] = {}
    for table, rank in zip(shards.table.tolist(), ranks.tolist(), strict=True):
        used.setdefault(table, set()).add(rank)
    return rules.broken(used) if rules else ""


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


def _units(rules: RankRules, shards: ProposedShards, whole: Container[int] = ()) -> Ints:
    """The first shard of the unit of each: tables kept together are a unit, and those of ``whole``: ``[N]``."""
    leader: dict[int, int] = {}
    units = np.arange(len(shards))
    for shard, table in enumerate(shards.table.tolist()):
        if shards.gang[shard] == NO_GANG and (table in rules.together or table in whole):
            units[shard] = leader.setdefault(rules.together.get(table, (table,))[0], shard)
    return units


def _placed_units(
    rules: RankRules, partitioner: Partitioner, shards: ProposedShards, units: Ints
) -> Ints | Misfit:
    """Place units of shards."""
    leaders, unit = np.unique(units, return_inverse=True)
    memory = np.zeros((len(leaders), len(shards.tiers)), dtype=np.int64)
    np.add.at(memory, unit, shards.memory_bytes)
    class_ms = np.zeros((len(leaders), shards.class_ms.shape[1]))
    np.add.at(class_ms, unit, shards.class_ms)
    rank, held = shards.rank.copy(), dict(rules.masks)
    for table, mask in rules.masks.items():
        own = shards.table == table
        if mask.sum() == 1 and (shards.gang[own] == NO_GANG).all():
            # Fixed there, it takes of no resource: its rank would look fuller than others to what compares resources.
            rank[own] = np.argmax(held.pop(table))
    needs, has = [], []
    for tables, of_ranks in rules.resources(held, len(shards)):
        needs.append(np.where(np.isin(units, units[np.isin(shards.table, tables)]), NEED, 0))
        has.append(of_ranks)
    asked = attrs.evolve(
        shards.only(leaders),
        rank=rank[leaders],
        cost_ms=np.bincount(unit, shards.cost_ms).astype(np.float64),
        class_ms=class_ms,
        memory_bytes=np.column_stack([memory, *(need[leaders] for need in needs)]),
        tiers=(*shards.tiers, *(f"rule {number}" for number in range(len(has)))),
        capacity_bytes=np.column_stack([shards.capacity_bytes, *has]),
        fixed_bytes=np.column_stack([shards.fixed_bytes, *np.zeros_like(has)]),
    )
    placed = asked.fixed_misfit() or _placed_by(partitioner, asked)
    if not isinstance(placed, Misfit):
        return placed[unit]
    shard = int(leaders[placed.shard])
    if placed.tier in shards.tiers:
        return attrs.evolve(placed, shard=shard)
    # The rules leave no rank open: none of its memory is free for it.
    tier = int(np.argmax(memory[placed.shard]))
    return attrs.evolve(
        placed,
        shard=shard,
        tier=shards.tiers[tier],
        needed_bytes=int(memory[placed.shard, tier]),
        free_bytes=0,
        capacity_bytes=int(shards.capacity_bytes[placed.rank, tier]),
    )
