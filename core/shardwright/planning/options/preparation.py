"""Preparation of a search: every option with its costs, and the capacity of the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from shardwright.planning.options.enumeration import enumerate_options
from shardwright.planning.options.inputs import Request
from shardwright.planning.options.planning_plugins import PlanningPlugins
from shardwright.planning.options.rank_rules import RankRules
from shardwright.planning.options.search_space import SearchSpace, estimate_costs
from shardwright.planning.tables.spec import TableSpec
from shardwright.planning.watch import Watch


def prepare(
    tables: Sequence[TableSpec],
    request: Request,
    plugins: PlanningPlugins,
    *,
    on_this_machine: bool = False,
    watch: Watch | None = None,
) -> SearchSpace:
    """Ask sharding types and kernels for options, and the estimators for their costs.

    Args:
        tables: tables to shard.
        request: over what, and what the user asks.
        plugins: the plugins that plan.
        on_this_machine: plan for this machine, so what is installed here counts.
        watch: watch of the search to come; ends this too.

    Raises:
        KeyboardInterrupt: somebody asked for an end before the options were known.
        PlanningError: nothing is left for some table, or an estimator broke its contract.
        NoPlanError: constraints contradict each other.
        UnknownNameError: the constraints name a table, type or kernel that does not exist.
    """
    rules = RankRules.of(request.constraints, tables, request.topology)
    options = enumerate_options(
        tables,
        request.topology,
        request.constraints,
        plugins.plugin_host,
        batch_size=request.batch_size,
        on_this_machine=on_this_machine,
        fold_tables=plugins.performance.depends_on_shape_only and plugins.storage.depends_on_shape_only,
        space=plugins.offered_space(request.topology),
        rules=rules,
        watch=watch,
    )
    ids_per_batch = float(options.ids_per_batch @ options.multiplicity)
    capacity = request.reservation.capacity_bytes(request.topology, ids_per_batch)
    space = estimate_costs(options, request.topology, plugins.performance, plugins.storage, capacity)
    return attrs.evolve(space, rules=rules)
