"""Searches that no plugin makes worse: what others offer unasked may better a plan, and nothing else.

A search is no proof: with more options it may end at a worse plan. So where tables are offered sharding types of other
distributions that nobody named, the search runs without these first, and then goes on from that plan with all.

Legend: A tables, T distinct tables, O options, S runs of shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np

from shardwright.planning.arrays import Bools
from shardwright.planning.options.options import Options
from shardwright.planning.options.planning_plugins import PlanningPlugins
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.search.placement import Placed
from shardwright.planning.search.search import SearchResult, search
from shardwright.planning.tables.constraints import Constraints
from shardwright.planning.watch import Watch

if TYPE_CHECKING:
    from shardwright.contracts.sharding_type import ShardingType
    from shardwright.host.registry import Registry

# The part of the time and the work that the search without strangers' options may use.
_OF_FIRST = 0.5


def search_unharmed(
    space: SearchSpace, constraints: Constraints, plugins: PlanningPlugins, watch: Watch
) -> SearchResult:
    """Search a space; the plan is never worse than without what strangers' plugins offer unasked.

    Args:
        space: options, costs, capacities.
        constraints: demands of the user, by table.
        plugins: proposers and partitioners.
        watch: told of progress, and asked whether to end.

    Raises:
        PlanningError: a proposer or a partitioner broke its contract.
    """
    kept = _without_strangers(space.options, constraints, plugins.plugin_host.sharding_types)
    if kept.all():
        return _search(space, plugins, watch)
    first = _search(_subspace(space, kept), plugins, watch.share(_OF_FIRST))
    if first.proposal is None or first.feedback.ranks is None:
        return _search(space, plugins, watch)
    placed = Placed(np.flatnonzero(kept)[first.proposal], first.feedback.ranks)
    return search(
        space,
        plugins.proposers,
        plugins.partitioner,
        last_resorts=plugins.last_resorts,
        watch=watch,
        known={first.proposer: placed},
    )


def _search(space: SearchSpace, plugins: PlanningPlugins, watch: Watch) -> SearchResult:
    return search(
        space, plugins.proposers, plugins.partitioner, last_resorts=plugins.last_resorts, watch=watch
    )


def _without_strangers(options: Options, constraints: Constraints, types: Registry[ShardingType]) -> Bools:
    """The options that are there without other distributions' sharding types, or by a name in constraints: ``[O]``.

    All options of a table that has no such ones.
    """
    entries = types.entries
    is_own = np.array([entries[kind.name].provenance.is_own for kind in options.sharding_types], dtype=bool)
    is_asked = np.array([constraints.of(table).sharding_types is not None for table in options.tables])
    kept = is_own[options.sharding_type] | is_asked[options.table]
    has_some = np.logical_or.reduceat(kept, options.first_option[:-1])
    every: Bools = kept | ~has_some[options.table]
    return every


def _subspace(space: SearchSpace, kept: Bools) -> SearchSpace:
    """The space of some of the options, at least one of each table.

    Args:
        space: options, costs, capacities.
        kept: ``[O]``.
    """
    options = space.options
    runs = kept[options.option]
    counts = np.diff(options.first_shard)[kept]
    tables = np.arange(len(options.tables) + 1)
    columns = {name: getattr(options, name)[kept] for name in _OF_OPTIONS}
    columns |= {name: getattr(options, name)[runs] for name in _OF_RUNS}
    fewer = attrs.evolve(
        options,
        **columns,
        layouts=tuple(layout for layout, keep in zip(options.layouts, kept, strict=True) if keep),
        first_option=np.searchsorted(columns["table"], tables).astype(np.int64),
        first_shard=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        option=np.repeat(np.arange(len(counts), dtype=np.int64), counts),
    )
    return attrs.evolve(
        space,
        options=fewer,
        phases={phase: column[runs] for phase, column in space.phases.items()},
        memory_bytes=space.memory_bytes[runs],
    )


_OF_OPTIONS = (
    "table",
    "sharding_type",
    "compute_kernel",
    "cuts_rows",
    "is_replicated",
    "sums_inside_host",
)
_OF_RUNS = (
    "count",
    "num_rows",
    "num_columns",
    "is_copy",
    "id_fraction",
    "rank",
    "gang",
    "local_rank",
    "request",
)
