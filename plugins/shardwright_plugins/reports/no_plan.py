"""Explanations of why there is no plan, with the numbers, and what would help; proofs of that which need no search.

Legend: A tables, M memory tiers, O options, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

import attrs
import numpy as np
from attrs import frozen

from shardwright.arguments import some
from shardwright.errors import NoPlanError, ShardwrightError
from shardwright.planning.arrays import Ints
from shardwright.planning.options.enumeration import prepare
from shardwright.planning.options.inputs import Request
from shardwright.planning.options.planning_plugins import PlanningPlugins
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.search.placement import Misfit, fixed_misfit, propose
from shardwright.planning.search.ruled_placement import place_within
from shardwright.planning.search.search import SearchResult
from shardwright.planning.tables.constraints import Constraints
from shardwright.planning.text import bytes_text, count_text

# Above this part of the memory, that shards pack badly is the likely reason; and so much more than is needed suffices
# for most instances of tests/benchmarks/planning/plan_instances.py.
_TIGHT, _SPARE = 0.8, 0.1
_MORE = (
    " More ranks or memory, a smaller data type or storage_reservation, or a sharding type or kernel that needs "
    "less of it on one rank would help."
)
_LOOSEN = (
    " Loosen 'ranks' or 'together' of the constraints; or more memory, a smaller data type, batch size or "
    "storage_reservation."
)


def no_plan(
    space: SearchSpace,
    request: Request,
    plugins: PlanningPlugins,
    result: SearchResult | None = None,
    limit: str = "",
) -> NoPlanError | None:
    """The error that says why there is no plan; before a search ``None``, if nothing is known against one.

    Args:
        space: options and costs.
        request: request of the user.
        plugins: the plugins that plan.
        result: outcome of the search that found none; ``None`` before one.
        limit: name of the limit that the search had.
    """
    if result is not None:
        return _not_found(space, result, request, plugins, limit)
    too_large = _too_large(space)
    if too_large is not None:
        table, text, help_text = too_large
        would_fit = _what_would_fit(space, table, request, plugins)
        return NoPlanError(text + (would_fit or help_text))
    need = next((need for need in _needs(space) if need.least_bytes > need.usable_bytes), None)
    if need is None:
        return None
    help_text = f" I{_enough_text(space, need)[1:]}" if need.tables is None else _LOOSEN
    return NoPlanError(f"no plan: {need.text(space)}.{help_text}")


def _not_found(
    space: SearchSpace, result: SearchResult, request: Request, plugins: PlanningPlugins, limit: str
) -> NoPlanError:
    """The error for a search that found nothing: a proof if there is one, else what was short."""
    misfit, room = result.misfit, _room_text(space)
    nearest = "" if misfit is None else _misfit_text(space, misfit)
    if result.lower_bound_ms > space.most_ms:
        came = f" In what came nearest, {nearest}." if nearest else ""
        return NoPlanError(
            "no plan: it is proven that no choice of options for the "
            f"{count_text(len(space.options.all_tables), 'table')} fits in the memory of "
            f"{count_text(len(space.capacity_bytes), 'rank')}.{came}{room}{_MORE}"
        )
    ended = f" The search ended at its {limit}; allow it more (seconds=...)." if result.is_cut_short else ""
    if misfit is None:
        names = ", ".join(repr(proposer.name) for proposer in plugins.proposers)
        return NoPlanError(
            f"no plan found: proposer {names} proposed nothing that fits, and nothing proves that there is none."
            f"{room} Another proposer may find one.{ended}"
        )
    return NoPlanError(
        f"no plan found: tried {count_text(result.num_proposals, 'proposal')}, none fitted. In the one that came "
        f"nearest, {nearest}.{room} A plan may exist all the same: try another proposer or partitioner, a smaller "
        "storage_reservation, or more ranks." + _what_would_fit(space, misfit.table, request, plugins) + ended
    )


def _too_large(space: SearchSpace) -> tuple[int, str, str] | None:
    """The first table of which no option fits on the ranks that it may use, were they empty.

    Returns:
        Its index among all tables, a text, and what would help.
    """
    options, rules, world_size = space.options, space.rules, len(space.capacity_bytes)
    fits = np.logical_or.reduceat(space.fits_alone, options.first_option[:-1])[options.distinct_table]
    ruled = rules.concerned if rules else frozenset[int]()
    for table in sorted({*np.flatnonzero(~fits).tolist(), *ruled}):
        ranks = sorted(rules.allowed(table)) if rules else list(range(world_size))
        mine = np.array(options.of_table(int(options.distinct_table[table])))
        has = space.capacity_bytes[ranks].max(axis=0)
        short = space.largest_bytes[mine] - has  # of one rank, by option and tier
        nearest = int(np.argmin(short.max(axis=1)))
        tier, option = int(np.argmax(short[nearest])), int(mine[nearest])
        if short[nearest, tier] <= 0:
            continue
        rank = ranks[int(np.argmax(space.capacity_bytes[ranks, tier]))]
        is_kept = len(ranks) < world_size
        only = f" may use no ranks but {some(ranks)}, and" if is_kept else ""
        text = (
            f"no plan: table {options.all_tables[table].describe()}{only} needs "
            f"{bytes_text(space.largest_bytes[option, tier])} of {space.tiers[tier]} on one rank, as "
            f"{_option_text(space, option)}; the emptiest rank ({rank}) has {bytes_text(has[tier])}"
            f"{_of_total(space, rank, tier)}."
        )
        return table, text, _LOOSEN if is_kept else _MORE
    return None


@frozen
class _Need:
    """Least memory that some tables need of some tiers together.

    Args:
        tables: indices among all tables; ``None`` for all of them on all ranks.
        where: words for what keeps the tables to some ranks.
        tiers: indices of the tiers.
        least_bytes: bytes that the least needy options take.
        usable_bytes: bytes that these ranks have, without what is reserved.
        total_bytes: bytes that they have.
    """

    tables: tuple[int, ...] | None
    where: str
    tiers: tuple[int, ...]
    least_bytes: int
    usable_bytes: int
    total_bytes: int

    def text(self, space: SearchSpace) -> str:
        """``the 26 tables need at least 21.8 TiB of hbm and ddr together, ...; the 16 ranks have 8.8 TiB``."""
        tables, count = space.options.all_tables, len(space.capacity_bytes)
        who = f"the {count_text(len(tables), 'table')} need{'s' * (len(tables) == 1)}"
        have = f"the {count_text(count, 'rank')} {'has' if count == 1 else 'have'}"
        if self.tables is not None:
            names = some([tables[table].path for table in self.tables])
            who, have = f"{len(self.tables)} of the tables ({names}) {self.where}, and need", "there is"
        is_reserved = self.usable_bytes < self.total_bytes
        reserved = f" (of {bytes_text(self.total_bytes)}, the rest is reserved)" if is_reserved else ""
        return (
            f"{who} at least {bytes_text(self.least_bytes)} of "
            f"{' and '.join(space.tiers[tier] for tier in self.tiers)} together, whatever is chosen; {have} "
            f"{bytes_text(self.usable_bytes)}{reserved}"
        )


def _needs(space: SearchSpace) -> Iterator[_Need]:
    """Yield the need of all tables for each tier in use, each two, and so on; then of those kept to some ranks."""
    used = np.flatnonzero(space.total_bytes.any(axis=0)).tolist()
    chosen = [tiers for count in range(1, len(used) + 1) for tiers in combinations(used, count)]
    for tables, where, ranks, together in _kept_to_ranks(space):
        for tiers in chosen:
            least = np.minimum.reduceat(
                space.total_bytes[:, tiers].sum(axis=1), space.options.first_option[:-1]
            )
            of_each = least[space.options.distinct_table]
            usable, total = (
                int(together(capacity[ranks][:, tiers].sum(axis=1)))
                for capacity in (space.capacity_bytes, space.topology.capacity_bytes)
            )
            needed = int((of_each if tables is None else of_each[list(tables)]).sum())
            yield _Need(tables, where, tiers, needed, usable, total)


def _kept_to_ranks(
    space: SearchSpace,
) -> Iterator[tuple[tuple[int, ...] | None, str, list[int], Callable[[Ints], int]]]:
    """Yield tables, what keeps them to some ranks, these, and how the memory of these goes together."""
    yield None, "", list(range(len(space.capacity_bytes))), np.sum
    rules = space.rules
    if rules is None:
        return
    for group in dict.fromkeys(rules.together.values()):
        yield group, "are kept together on one rank", sorted(rules.allowed(group[0])), np.max
    for allowed in dict.fromkeys(rules.allowed(table) for table in sorted(rules.ranks)):
        tables = tuple(table for table in sorted(rules.concerned) if rules.allowed(table) <= allowed)
        ranks = sorted(allowed)
        yield tables, f"may use no ranks but {some(ranks)}", ranks, np.sum


def _enough_text(space: SearchSpace, need: _Need, spare: float = 0.0) -> str:
    """Name the least number of ranks, or memory of each, that would be enough.

    Args:
        space: options and capacities.
        need: need of all tables.
        spare: the part of what is needed that is to be left over.
    """
    world_size, tier = len(space.capacity_bytes), need.tiers[0]
    least = int(need.least_bytes * (1 + spare))
    usable = int(space.capacity_bytes[:, tier].sum())
    total = int(space.topology.capacity_bytes[:, tier].sum())
    more = max(0.0, (least - need.usable_bytes) * (total / usable if usable else 1) / world_size)
    ways = [f"{bytes_text(more)} more of {space.tiers[tier]} on each"]
    if need.usable_bytes:
        ways.insert(0, f"{-(-least * world_size // need.usable_bytes)} such ranks")
    what = f"to have {spare:.0%} to spare, it takes" if spare else "it takes at least"
    return f"{what} {' or '.join(ways)}; or a smaller data type, batch size or storage_reservation."


def _room_text(space: SearchSpace) -> str:
    """Tell the need and the supply of the scarcest memory, and what would leave some over."""
    each = [n for n in _needs(space) if n.tables is None and n.usable_bytes and n.least_bytes]
    if not each:
        return ""
    need = max(each, key=lambda need: need.least_bytes / need.usable_bytes)
    part = need.least_bytes / need.usable_bytes
    text = f" Of memory, {need.text(space)}: {part:.1%} of it is needed."
    if part < _TIGHT:
        return text
    return f"{text} Shards do not fill ranks to the last byte: {_enough_text(space, need, spare=_SPARE)}"


def _misfit_text(space: SearchSpace, misfit: Misfit) -> str:
    table = space.options.all_tables[misfit.table].describe()
    needed = f"{bytes_text(misfit.needed_bytes)} of {misfit.tier}"
    of_total = _of_total(space, misfit.rank, space.tiers.index(misfit.tier))
    has = f"has {bytes_text(misfit.free_bytes)} left of {bytes_text(misfit.capacity_bytes)}{of_total}"
    if misfit.is_fixed:
        return (
            f"the shards that must live on rank {misfit.rank} need {needed} together, the largest is of table "
            f"{table}; it {has}"
        )
    if misfit.gang_size > 1:
        return (
            f"a shard of table {table}, one of {misfit.gang_size} that must share a host, needs {needed}; on the host "
            f"that came nearest, the rank with most room ({misfit.rank}) {has}"
        )
    return f"a shard of table {table} needs {needed}; the emptiest rank ({misfit.rank}) {has}"


def _of_total(space: SearchSpace, rank: int, tier: int) -> str:
    """Tell that a rank's capacity is in part reserved; empty if it is not."""
    total = int(space.topology.capacity_bytes[rank, tier])
    usable = int(space.capacity_bytes[rank, tier])
    return f" (of {bytes_text(total)}, the rest is reserved)" if usable < total else ""


def _option_text(space: SearchSpace, option: int) -> str:
    """Names of an option's sharding type and kernel, and its number of blocks."""
    options, count = space.options, int(space.options.shards_per_option[option])
    kind, kernel = options.type_of(option).name, options.kernel_of(option).name
    return f"{kind!r} with kernel {kernel!r} ({count} block{'s' if count > 1 else ''})"


def _what_would_fit(space: SearchSpace, table: int, request: Request, plugins: PlanningPlugins) -> str:
    """A type or kernel that the constraints exclude and that would fit on empty ranks, if there is one."""
    spec = space.options.all_tables[table]
    rule = request.constraints.of(spec)
    if rule.sharding_types is None and rule.compute_kernels is None:
        return ""
    rule = attrs.evolve(rule, sharding_types=None, compute_kernels=None)
    alone = attrs.evolve(request, constraints=Constraints({spec.path: rule}))
    try:
        freed = attrs.evolve(prepare([spec], alone, plugins), capacity_bytes=space.capacity_bytes)
    except ShardwrightError:
        return ""
    for option in range(freed.options.num_options):
        proposal = np.array([option])
        shards = propose(freed, proposal)
        fits = fixed_misfit(freed, proposal, shards) is None
        if fits and not isinstance(place_within(freed.rules, plugins.partitioner, shards), Misfit):
            tier = int(np.argmax(freed.largest_bytes[option]))
            return (
                f" {_option_text(freed, option)} needs {bytes_text(freed.largest_bytes[option, tier])} of "
                f"{space.tiers[tier]} for its largest block: allow it in constraints[{spec.name!r}]."
            )
    return ""
