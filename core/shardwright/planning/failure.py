"""Why there is no plan, with the numbers, and what would help."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from shardwright.errors import NoPlanError, ShardwrightError
from shardwright.planning.constraints import Constraints
from shardwright.planning.enumeration import enumerate_options
from shardwright.planning.inputs import Request
from shardwright.planning.options import Ints, Options
from shardwright.planning.parts import Parts
from shardwright.planning.placement import Misfit, fixed_misfit, propose
from shardwright.planning.rank_rules import some
from shardwright.planning.search import SearchResult
from shardwright.planning.space import SearchSpace, estimate_costs
from shardwright.planning.tables import TableSpec
from shardwright.planning.text import bytes_text

_MORE = (
    " More ranks or memory, a smaller data type or storage_reservation, or a sharding type or kernel that needs "
    "less of it on one rank would help."
)


def explain_no_plan(
    space: SearchSpace, result: SearchResult, request: Request, parts: Parts, *, here: bool
) -> NoPlanError:
    """The error for a search that found nothing: a proof if there is one, else what was short."""
    too_large = _table_too_large(space)
    if too_large is not None:
        table, text = too_large
        return NoPlanError(text + (_what_would_fit(space, table, request, parts, here=here) or _MORE))
    together = _too_much_together(space)
    crowded = together or _too_much_for_rules(space)
    if crowded:
        return NoPlanError(crowded)
    if result.lower_bound_ms > space.most_ms:
        return NoPlanError(_refuted_text(space, result))
    if result.misfit is None:
        names = ", ".join(repr(proposer.name) for proposer in parts.proposers)
        return NoPlanError(
            f"no plan found: proposer {names} proposed nothing. Try another one, a smaller storage_reservation, or "
            "more ranks."
        )
    text = _nearest_text(space, result, result.misfit)
    return NoPlanError(text + _what_would_fit(space, result.misfit.table, request, parts, here=here))


def _table_too_large(space: SearchSpace) -> tuple[int, str] | None:
    """The first of all tables of which no option fits, even alone."""
    options = space.options
    fits = np.logical_or.reduceat(space.fits_alone, options.first_option[:-1])
    if fits.all():
        return None
    distinct = int(np.argmin(fits))
    table = int(np.argmax(options.alike == distinct))
    mine = np.array(options.of_table(distinct))
    most = space.capacity_bytes.max(axis=0)
    share = (space.largest_bytes[mine] / np.maximum(most, 1)).max(axis=1)
    option = int(mine[np.argmin(share)])
    tier = int(np.argmax(space.largest_bytes[option] / np.maximum(most, 1)))
    rank = int(np.argmax(space.capacity_bytes[:, tier]))
    return table, (
        f"no plan: table {options.all_tables[table].describe()} needs "
        f"{bytes_text(space.largest_bytes[option, tier])} of {space.tiers[tier]} on one rank, as "
        f"{options.type_of(option).name!r} with kernel {options.kernel_of(option).name!r} "
        f"({_blocks(options, option)}); the emptiest rank ({rank}) has "
        f"{bytes_text(space.capacity_bytes[rank, tier])}{_of_total(space, rank, tier)}."
    )


def _too_much_together(space: SearchSpace) -> str:
    """Whether all tables together need more than all ranks have, whatever is chosen."""
    each = np.minimum.reduceat(space.total_bytes, space.options.first_option[:-1], axis=0)
    least = (each * space.options.multiplicity[:, None]).sum(axis=0)
    have = space.capacity_bytes.sum(axis=0)
    short = np.flatnonzero(least > have)
    if not len(short):
        return ""
    tier = int(short[0])
    world_size = len(space.capacity_bytes)
    enough = -(-int(least[tier]) * world_size // max(1, int(have[tier])))
    return (
        f"no plan: the {len(space.options.all_tables)} tables need at least {bytes_text(least[tier])} of "
        f"{space.tiers[tier]} together, whatever is chosen; the {world_size} ranks have "
        f"{bytes_text(have[tier])}. At least {enough} such ranks are needed; or a smaller data type, "
        "batch size or storage_reservation, or kernels that use another memory."
    )


def _too_much_for_rules(space: SearchSpace) -> str:
    """Whether tables that rules keep to some ranks need more than these have, whatever is chosen."""
    rules, least = space.rules, _least_bytes(space)
    if rules is None:
        return ""
    for table in sorted(rules.concerned):
        text = _lonely_text(space, table, sorted(rules.allowed(table)))
        if text:
            return text
    for group in dict.fromkeys(rules.together.values()):
        have = space.capacity_bytes[sorted(rules.allowed(group[0]))].max(axis=0)
        text = _crowded_text(space, group, "are kept together on one rank", least, have)
        if text:
            return text
    for ranks in dict.fromkeys(rules.allowed(table) for table in sorted(rules.ranks)):
        tables = tuple(table for table in sorted(rules.concerned) if rules.allowed(table) <= ranks)
        have = space.capacity_bytes[sorted(ranks)].sum(axis=0)
        text = _crowded_text(space, tables, f"may use no ranks but {some(sorted(ranks))}", least, have)
        if text:
            return text
    return ""


def _lonely_text(space: SearchSpace, table: int, ranks: Sequence[int]) -> str:
    """That no option of a table goes into its ranks, were they empty; empty if one does."""
    mine = np.array(space.options.of_table(int(space.options.alike[table])))
    there = space.capacity_bytes[list(ranks)]
    over = np.maximum(
        (space.total_bytes[mine] - there.sum(axis=0)).max(axis=1),
        (space.largest_bytes[mine] - there.max(axis=0)).max(axis=1),
    )
    nearest = int(np.argmin(over))
    if over[nearest] <= 0:
        return ""
    option = int(mine[nearest])
    needs, has = (
        ", ".join(
            f"{bytes_text(size)} of {tier}" for tier, size in zip(space.tiers, sizes.tolist(), strict=True)
        )
        for sizes in (space.total_bytes[option], there.sum(axis=0))
    )
    return (
        f"no plan: table {space.options.all_tables[table].describe()} may use no ranks but {some(ranks)}, which have "
        f"{has}; of its options none fits there. That which comes nearest, "
        f"{space.options.type_of(option).name!r} with kernel {space.options.kernel_of(option).name!r} "
        f"({_blocks(space.options, option)}), needs {needs}. Loosen its constraint 'ranks'; or more memory, a smaller "
        "data type, batch size or storage_reservation."
    )


def _least_bytes(space: SearchSpace) -> Ints:
    """What each of all tables needs of each tier at least: ``[A, M]``."""
    least: Ints = np.minimum.reduceat(space.total_bytes, space.options.first_option[:-1], axis=0)
    return least[space.options.alike]


def _crowded_text(space: SearchSpace, tables: Sequence[int], where: str, least: Ints, have: Ints) -> str:
    """That some tables need more than there is where they are kept; empty if they do not."""
    need = least[list(tables)].sum(axis=0)
    tier = int(np.argmax(need - have))
    if need[tier] <= have[tier]:
        return ""
    names = some([space.options.all_tables[table].path for table in tables])
    return (
        f"no plan: {len(tables)} of the tables ({names}) {where}, and need at least {bytes_text(need[tier])} of "
        f"{space.tiers[tier]} there, whatever is chosen; there is {bytes_text(have[tier])}. Loosen 'ranks' or "
        "'together' of their constraints; or more memory, a smaller data type, batch size or storage_reservation."
    )


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
    return text + _MORE


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
        f"nearest, {nearest}{_of_total(space, misfit.rank, tier)}. A plan may exist all the same: try "
        "another proposer or partitioner, a smaller storage_reservation, or more ranks."
    )


def _of_total(space: SearchSpace, rank: int, tier: int) -> str:
    total = int(space.topology.capacity_bytes[rank, tier])
    usable = int(space.capacity_bytes[rank, tier])
    return f" (of {bytes_text(total)}, the rest is reserved)" if usable < total else ""


def _blocks(options: Options, option: int) -> str:
    count = int(options.shards_per_option[option])
    return f"{count} block{'s' if count > 1 else ''}"


def _what_would_fit(space: SearchSpace, table: int, request: Request, parts: Parts, *, here: bool) -> str:
    """A type or kernel that the constraints exclude and that would fit on empty ranks, if there is one."""
    spec = space.options.all_tables[table]
    rule = request.constraints.of(spec)
    if rule.sharding_types is None and rule.compute_kernels is None:
        return ""
    try:
        freed = _freed_space(space, spec, request, parts, here=here)
    except ShardwrightError:
        return ""
    options = freed.options
    for option in range(options.num_options):
        kind, kernel = options.type_of(option).name, options.kernel_of(option).name
        alone = np.array([option])
        shards = propose(freed, alone)
        fits = fixed_misfit(freed, alone, shards) is None
        if fits and not isinstance(parts.partitioner.place(shards), Misfit):
            tier = int(np.argmax(freed.largest_bytes[option]))
            return (
                f" {kind!r} with kernel {kernel!r} ({_blocks(options, option)}) needs "
                f"{bytes_text(freed.largest_bytes[option, tier])} of {space.tiers[tier]} for its largest "
                f"block: allow it in constraints[{spec.name!r}]."
            )
    return ""


def _freed_space(
    space: SearchSpace, table: TableSpec, request: Request, parts: Parts, *, here: bool
) -> SearchSpace:
    """The options of one table without its constraints on types and kernels, and their memory."""
    from shardwright.plugins import host

    rule = attrs.evolve(request.constraints.of(table), sharding_types=None, compute_kernels=None)
    options = enumerate_options(
        [table],
        space.topology,
        Constraints({table.path: rule}),
        host(),
        batch_size=request.batch_size,
        here=here,
        space=parts.space(space.topology),
    )
    return estimate_costs(options, space.topology, parts.performance, parts.storage, space.capacity_bytes)
