"""Placing shards within the rules on ranks, by any partitioner: it sees rules as fixed ranks and as resources.

Tables kept together are one shard. A shard that may use one rank only is fixed there. A larger set of ranks is a
resource of which all others have too little. Tables kept apart share a resource of which each rank has enough for one
shard. Legend: N shards that may move, U units of shards that get one rank, W ranks, M memory tiers.
"""

from __future__ import annotations

from collections.abc import Container

import attrs
import numpy as np

from shardwright.contracts.partitioner import Partitioner
from shardwright.errors import PlanningError
from shardwright.planning.arrays import NO_GANG, Ints
from shardwright.planning.options.rank_rules import RankRules
from shardwright.planning.plugin_calls import calling, whole_numbers
from shardwright.planning.search.placement import Misfit, ProposedShards

# A shard's need of a resource, and what a rank has of it: too little for any, or enough for one. None has nothing, or
# looks full with one shard, since partitioners compare resources by the part that is taken.
_NEED, _TOO_LITTLE, _FOR_ONE = 2, 1, 3


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
    rank, needs, has = _as_resources(rules, shards, units)
    columns = {name: getattr(shards, name)[leaders] for name in ("shard", "table", "gang", "local_rank")}
    asked = attrs.evolve(
        shards,
        **columns,
        rank=rank[leaders],
        cost_ms=np.bincount(unit, shards.cost_ms).astype(np.float64),
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
    tier = int(
        np.argmax(memory[placed.shard])
    )  # the rules leave no rank open: none of its memory is free for it
    return attrs.evolve(
        placed,
        shard=shard,
        tier=shards.tiers[tier],
        needed_bytes=int(memory[placed.shard, tier]),
        free_bytes=0,
        capacity_bytes=int(shards.capacity_bytes[placed.rank, tier]),
    )


def _as_resources(
    rules: RankRules, shards: ProposedShards, units: Ints
) -> tuple[Ints, list[Ints], list[Ints]]:
    """The rules for units.

    Returns:
        The rank of units that may use one only ``[N]``, and for each resource what units need ``[N]`` and ranks have
        ``[W]``; of units, the element of their first shard counts.
    """
    rank, needs, has = shards.rank.copy(), list[Ints](), list[Ints]()
    tables: dict[bytes, list[int]] = {}
    for table in sorted(rules.concerned):
        tables.setdefault(rules.masks[table].tobytes(), []).append(table)
    for own in tables.values():
        mask, is_own = rules.masks[own[0]], np.isin(shards.table, own)
        is_pinned = is_own & (shards.gang == NO_GANG) & (mask.sum() == 1)
        rank[is_pinned] = np.argmax(mask)
        if not mask.all() and (is_own & ~is_pinned).any():
            needs.append(np.where(is_own & ~is_pinned, _NEED, 0))
            has.append(np.where(mask, _NEED * len(shards) + 1, _TOO_LITTLE))
    for group in rules.apart:
        of_group = np.isin(units, units[np.isin(shards.table, group)])
        needs.append(np.where(of_group, _NEED, 0))
        has.append(np.full(shards.world_size, _FOR_ONE))
    return rank, needs, has
