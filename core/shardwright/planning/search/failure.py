"""Explanations of why there is no plan, with the numbers, and what would help."""

from __future__ import annotations

import attrs
import numpy as np

from shardwright.errors import NoPlanError, ShardwrightError
from shardwright.planning.options.enumeration import enumerate_options
from shardwright.planning.options.inputs import Request
from shardwright.planning.options.planning_plugins import PlanningPlugins
from shardwright.planning.options.search_space import SearchSpace, estimate_costs
from shardwright.planning.search.impossible import (
    MORE,
    blocks_text,
    enough_text,
    of_total,
    scarcest,
    table_too_large,
    too_much,
)
from shardwright.planning.search.placement import Misfit, fixed_misfit, propose
from shardwright.planning.search.search import SearchResult
from shardwright.planning.tables.constraints import Constraints
from shardwright.planning.tables.spec import TableSpec
from shardwright.planning.text import bytes_text

# Above this part of the memory, that shards pack badly is the likely reason; and so much more than is needed suffices
# for most workloads of tests/benchmarks/planning/plan_gaps.py.
_TIGHT, _SPARE = 0.8, 0.1


def why_impossible(
    space: SearchSpace, request: Request, plugins: PlanningPlugins, *, on_this_machine: bool
) -> NoPlanError | None:
    """The error, if no plan can fit for a reason that needs no search; else ``None``."""
    too_large = table_too_large(space)
    if too_large is not None:
        help_text = (
            _what_would_fit(space, too_large.table, request, plugins, on_this_machine=on_this_machine) or MORE
        )
        return NoPlanError(too_large.text + help_text)
    crowded = too_much(space)
    return NoPlanError(crowded) if crowded else None


def explain_no_plan(
    space: SearchSpace,
    result: SearchResult,
    request: Request,
    plugins: PlanningPlugins,
    *,
    on_this_machine: bool,
) -> NoPlanError:
    """The error for a search that found nothing: a proof if there is one, else what was short."""
    if result.lower_bound_ms > space.most_ms:
        return NoPlanError(_refuted_text(space, result))
    if result.misfit is None:
        names = ", ".join(repr(proposer.name) for proposer in plugins.proposers)
        return NoPlanError(
            f"no plan found: proposer {names} proposed nothing that fits, and nothing proves that there is none."
            f"{_room_text(space)} Another proposer may find one."
        )
    text = _nearest_text(space, result, result.misfit)
    return NoPlanError(
        text + _what_would_fit(space, result.misfit.table, request, plugins, on_this_machine=on_this_machine)
    )


def _room_text(space: SearchSpace) -> str:
    """Tell the need and the supply of the scarcest memory, and what would leave some over."""
    needed = scarcest(space)
    if needed is None:
        return ""
    part = needed.least_bytes / needed.usable_bytes
    text = f" Of memory, {needed.text(space)}: {part:.1%} of it is needed."
    if part < _TIGHT:
        return text
    return f"{text} Shards do not fill ranks to the last byte: {enough_text(space, needed, spare=_SPARE)}"


def _refuted_text(space: SearchSpace, result: SearchResult) -> str:
    have = ", ".join(
        f"{bytes_text(total)} of {tier}"
        for tier, total in zip(space.tiers, space.capacity_bytes.sum(axis=0).tolist(), strict=True)
    )
    text = (
        f"no plan: it is proven that no choice of options for the {len(space.options.all_tables)} tables fits in the "
        f"memory of {len(space.capacity_bytes)} ranks, which is {have} together."
    )
    if result.misfit is not None:
        misfit = result.misfit
        table = space.options.all_tables[misfit.table].describe()
        text += (
            f" In what came nearest, a shard of table {table} needs {bytes_text(misfit.needed_bytes)} of "
            f"{misfit.tier}, and rank {misfit.rank} has {bytes_text(misfit.free_bytes)} left."
        )
    return text + _room_text(space) + MORE


def _nearest_text(space: SearchSpace, result: SearchResult, misfit: Misfit) -> str:
    table = space.options.all_tables[misfit.table].describe()
    tier = space.tiers.index(misfit.tier)
    needed = f"{bytes_text(misfit.needed_bytes)} of {misfit.tier}"
    has = f"has {bytes_text(misfit.free_bytes)} left of {bytes_text(misfit.capacity_bytes)}"
    nearest = (
        f"the shards that must live on rank {misfit.rank} need {needed} together, the largest is of table "
        f"{table}; it {has}"
        if misfit.is_fixed
        else f"a shard of table {table}, one of {misfit.gang_size} that must share a host, needs {needed}; on the "
        f"host that came nearest, the rank with most room ({misfit.rank}) {has}"
        if misfit.gang_size > 1
        else f"a shard of table {table} needs {needed}; the emptiest rank ({misfit.rank}) {has}"
    )
    return (
        f"no plan found: {result.num_proposals} proposals were tried, none fitted. In the one that came "
        f"nearest, {nearest}{of_total(space, misfit.rank, tier)}.{_room_text(space)} A plan may exist all the "
        "same: try another proposer or partitioner, a smaller storage_reservation, or more ranks."
    )


def _what_would_fit(
    space: SearchSpace, table: int, request: Request, plugins: PlanningPlugins, *, on_this_machine: bool
) -> str:
    """A type or kernel that the constraints exclude and that would fit on empty ranks, if there is one."""
    spec = space.options.all_tables[table]
    rule = request.constraints.of(spec)
    if rule.sharding_types is None and rule.compute_kernels is None:
        return ""
    try:
        freed = _freed_space(space, spec, request, plugins, on_this_machine=on_this_machine)
    except ShardwrightError:
        return ""
    options = freed.options
    for option in range(options.num_options):
        kind, kernel = options.type_of(option).name, options.kernel_of(option).name
        alone = np.array([option])
        shards = propose(freed, alone)
        fits = fixed_misfit(freed, alone, shards) is None
        if fits and not isinstance(plugins.partitioner.place(shards), Misfit):
            tier = int(np.argmax(freed.largest_bytes[option]))
            return (
                f" {kind!r} with kernel {kernel!r} ({blocks_text(options, option)}) needs "
                f"{bytes_text(freed.largest_bytes[option, tier])} of {space.tiers[tier]} for its largest "
                f"block: allow it in constraints[{spec.name!r}]."
            )
    return ""


def _freed_space(
    space: SearchSpace, table: TableSpec, request: Request, plugins: PlanningPlugins, *, on_this_machine: bool
) -> SearchSpace:
    """The options of one table without its constraints on types and kernels, and their memory."""
    rule = attrs.evolve(request.constraints.of(table), sharding_types=None, compute_kernels=None)
    options = enumerate_options(
        [table],
        space.topology,
        Constraints({table.path: rule}),
        plugins.plugin_host,
        batch_size=request.batch_size,
        on_this_machine=on_this_machine,
        space=plugins.offered_space(space.topology),
    )
    return estimate_costs(options, space.topology, plugins.performance, plugins.storage, space.capacity_bytes)
