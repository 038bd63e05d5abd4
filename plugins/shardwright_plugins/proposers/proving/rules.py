"""Rules on ranks as resources: a space in which a search that knows nothing of rules keeps them.

What the resources are, :mod:`shardwright.planning.options.rank_rules` says. A table that may use one rank only, or is
kept together with others, gets its rank here, and its options live there by their layout.

Legend: A tables, O options, S runs of shards, W ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from operator import itemgetter

import attrs
import numpy as np

from shardwright.contracts.proposer import Proposals
from shardwright.planning.arrays import FREE, Bools, Floats, Ints
from shardwright.planning.options.rank_rules import NEED, TOO_LITTLE, RankRules
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.proofs import RANKS
from shardwright.planning.search.loaded import Feedback
from shardwright.planning.search.placement import Misfit, Placed, Proven, propose
from shardwright.planning.search.ruled_placement import place_within
from shardwright_plugins.partitioners.greedy_perf import GreedyPerf
from shardwright_plugins.proposers.proving.search import Search


def within_rules(search: Search) -> Proposals:
    """Plans that keep the rules on ranks, and bounds; choices of options if there is no plan.

    A bound is that of all plans, of which fewer keep the rules; or that of the ranks which some tables must share.

    Args:
        search: search of the space with its rules, which it leaves out.
    """
    given = search.space
    assert given.rules is not None  # the caller looked
    yield search.prover.proven
    yield _bound(given, given.rules)
    if not np.isfinite(search.prover.possible_ms):
        return
    feedback = Feedback()
    for proposal in islice(search.choices(), 1):
        feedback = yield proposal  # over many ranks it may be better than what is found at once
    is_found = np.isfinite(feedback.value_ms)
    ruled = ruled_space(search, given.rules)
    if ruled is not None:
        inner = Search(ruled[0], search.effort, search.watch, ruled[1])
        for proposed in inner.plans():
            if isinstance(proposed, Placed):
                is_found = True
                yield with_given_ranks(given, inner.space, proposed)
            elif not isinstance(proposed, Proven):
                is_found |= np.isfinite((yield proposed).value_ms)
    if not is_found:
        yield from search.choices()


def with_given_ranks(given: SearchSpace, plain: SearchSpace, placed: Placed) -> Placed:
    """A plan of the plain space as one of that with rules: some of its shards have their ranks in the plain one."""
    ranks: Ints = plain.options.rank[propose(given, placed.proposal).shard]
    ranks[ranks == FREE] = placed.ranks
    return Placed(placed.proposal, ranks)


def ruled_space(search: Search, rules: RankRules) -> tuple[SearchSpace, float] | None:
    """The space in which rules are resources, and what no plan in it is faster than.

    It has the same options and costs, more resources, and some of the ranks given. Fewer plans are in it than keep the
    rules, so that its bounds are none of the other's. ``None`` if the tables that get their ranks at once do not fit.
    """
    given_ranks = _given_ranks(search, rules)
    return None if given_ranks is None else _with_resources(search.space, rules, given_ranks)


def _given_ranks(search: Search, rules: RankRules) -> dict[int, int] | None:
    """The ranks of tables that get theirs at once, by distinct table; ``None`` if some find no room."""
    space = search.space
    settled = {
        table for table in rules.concerned if table in rules.together or len(rules.allowed(table)) == 1
    }
    if not settled:
        return {}
    alike = space.options.distinct_table
    for proposal in _single_shards(search, settled):
        shards = propose(space, proposal)
        shards = shards.only(np.isin(shards.table, sorted(rules.concerned)))
        ranks = place_within(rules, GreedyPerf(), shards)
        if not isinstance(ranks, Misfit):
            places = zip(shards.table.tolist(), ranks.tolist(), strict=True)
            return {int(alike[table]): rank for table, rank in places if table in settled}
    return None


def _single_shards(search: Search, settled: Iterable[int]) -> Iterator[Ints]:
    """Choices in which some tables have one shard: the fastest of these options, then the smallest."""
    space, prover = search.space, search.prover
    proposal = prover.maximise(prover.possible_ms * (1 + search.effort.ladder[0])).proposal()
    assert proposal is not None  # that time is one at which each table has an option
    options, capacity = space.options, np.maximum(space.capacity_bytes.max(axis=0), 1)
    is_single = (options.shards_per_option == 1) & space.fits_alone
    for measure in (space.total_cost_ms, (space.largest_bytes / capacity).max(axis=1)):
        for table in settled:
            mine = np.array(options.of_table(int(options.distinct_table[table])))
            mine = mine[is_single[mine]]
            if len(mine):
                proposal[table] = mine[np.argmin(measure[mine])]
        yield proposal


def _with_resources(
    space: SearchSpace, rules: RankRules, given_ranks: Mapping[int, int]
) -> tuple[SearchSpace, float]:
    """The space with columns that stand for rules, and what no plan in it is faster than."""
    options, ranks = space.options, np.arange(len(space.capacity_bytes))
    is_placed, is_barred = _placed_options(space, given_ranks)
    held = {
        table: mask for table, mask in rules.masks.items() if options.distinct_table[table] not in given_ranks
    }
    placed = set(options.table[is_placed].tolist())
    for table in sorted(rules.concerned - held.keys()):
        distinct = int(options.distinct_table[table])
        if distinct not in placed:
            held[table] = ranks == given_ranks[distinct]
    num_shards = int((options.shards_per_option * options.multiplicity[options.table]).sum())
    resources = [
        (np.isin(options.table, options.distinct_table[list(tables)]), has)
        for tables, has in rules.resources(held, num_shards)
    ]
    if is_barred.any():
        resources.append((is_barred, np.full(len(ranks), TOO_LITTLE)))
    needs = [np.where(takes[options.option], NEED, 0) for takes, _ in resources]
    given = np.array([given_ranks.get(table, FREE) for table in range(len(options.tables))])
    rank = np.where(is_placed[options.option], given[options.shard_table], options.rank)
    ruled = attrs.evolve(
        space,
        options=attrs.evolve(options, rank=rank),
        memory_bytes=np.column_stack([space.memory_bytes, *needs]),
        capacity_bytes=np.column_stack([space.capacity_bytes, *(has for _, has in resources)]),
        rules=None,
        further_tiers=tuple(f"rule {number}" for number in range(len(resources))),
    )
    return ruled, _crowded(space, rules, given_ranks, ~is_barred)[0]


def _placed_options(space: SearchSpace, given_ranks: Iterable[int]) -> tuple[Bools, Bools]:
    """Mark options that live on their table's rank, and others of these tables that are left out: ``[O]`` each.

    Several shards of a table on one rank are no better than one; where there is no option of one, they are left
    to a resource.
    """
    options = space.options
    of_given = np.isin(options.table, sorted(given_ranks))
    is_free = np.logical_and.reduceat(options.rank == FREE, options.first_shard[:-1])
    is_placed = of_given & (options.shards_per_option == 1) & is_free & space.fits_alone
    has_one = np.bincount(options.table, is_placed, len(options.tables)) > 0
    return is_placed, of_given & ~is_placed & has_one[options.table]


def _bound(space: SearchSpace, rules: RankRules) -> Proven:
    """The bound of the ranks that tables must share and that have most to do at least, or of tables kept together."""
    least_ms, ranks = _crowded(space, rules, {}, np.ones(space.options.num_options, dtype=bool))
    return Proven(least_ms, {"z_ms": least_ms, "multipliers": {}, RANKS: sorted(ranks)})


def _crowded(
    space: SearchSpace, rules: RankRules, given_ranks: Mapping[int, int], usable: Bools
) -> tuple[float, Collection[int]]:
    """Find the ranks that some tables must share among themselves with most to do; and their least time, ms."""
    options = space.options
    total = space.total_of(space.class_ms.min(axis=1))
    cost: Floats = np.where(usable & space.fits_alone, total, np.inf)
    least = np.minimum.reduceat(cost, options.first_option[:-1])
    needs: dict[frozenset[int], float] = {}
    for table in rules.concerned:
        distinct = int(options.distinct_table[table])
        given_rank = given_ranks.get(distinct)
        allowed = rules.allowed(table) if given_rank is None else frozenset([given_rank])
        needs[allowed] = needs.get(allowed, 0.0) + float(least[distinct])
    loads = [
        (sum(need for part, need in needs.items() if part <= ranks) / len(ranks), ranks) for ranks in needs
    ]
    for group in dict.fromkeys(rules.together.values()):
        loads.append((float(least[options.distinct_table[list(group)]].sum()), rules.allowed(group[0])))
    return max(loads, key=itemgetter(0), default=(0.0, ()))
