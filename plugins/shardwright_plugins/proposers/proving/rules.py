"""Rules on ranks as resources: a space in which a search that knows nothing of rules keeps them.

A set of ranks that tables may use is a resource of which other ranks have too little for any shard. Tables that are
kept apart share one of which each rank has enough for one shard. A table that may use one rank only, or is kept
together with others, gets its rank here, and its options live there by their layout.

Legend: A tables, O options, S runs of shards, W ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

import attrs
import numpy as np

from shardwright.contracts.proposer import Proposals
from shardwright.planning.arrays import FREE, Bools, Floats, Ints
from shardwright.planning.options.rank_rules import RankRules
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.search.placement import Feedback, Misfit, Placed, Proven, propose
from shardwright.planning.search.ruled_placement import place_within
from shardwright_plugins.partitioners.greedy_perf import GreedyPerf
from shardwright_plugins.proposers.proving.search import Search

# What a shard takes of a resource. A rank outside a set has half of that; one rank has room for one of the shards that
# are kept apart, and is two thirds full then, so that it does not look full to others.
_NEED, _TOO_LITTLE, _FOR_ONE = 2, 1, 3


def within_rules(search: Search) -> Proposals:
    """Plans that keep the rules on ranks, and bounds; choices of options if there is no plan.

    The bounds are those of all plans: with rules there are fewer.

    Args:
        search: search of the space with its rules, which it leaves out.
    """
    given = search.space
    assert given.rules is not None  # the caller looked
    yield search.prover.proven
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
    return None if given_ranks is None else _Resources(search.space, rules, given_ranks).space()


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


class _Resources:
    """The columns that stand for rules."""

    def __init__(self, space: SearchSpace, rules: RankRules, given_ranks: Mapping[int, int]) -> None:
        self._space, self._options, self._rules, self._given = space, space.options, rules, given_ranks
        self._world_size = len(space.capacity_bytes)
        self._names: list[str] = []
        self._needs: list[Ints] = []
        self._has: list[Ints] = []

    def space(self) -> tuple[SearchSpace, float]:
        """The space with these columns, and what no plan in it is faster than."""
        is_seated, barred = self._seated_options()
        if barred.any():
            self._add("elsewhere than its tables' rank", barred, np.full(self._world_size, _TOO_LITTLE))
        for ranks, tables in self._sets().items():
            self._add_set(ranks, self._of_tables(tables))
        for group in self._rules.apart:
            one = np.full(self._world_size, _FOR_ONE)
            members = {int(self._options.distinct_table[table]) for table in group}
            self._add("apart", self._of_tables(members), one)
        run_table = self._options.shard_table
        given_rank = np.array([self._given.get(table, FREE) for table in range(len(self._options.tables))])
        rank = np.where(is_seated[self._options.option], given_rank[run_table], self._options.rank)
        space = attrs.evolve(
            self._space,
            options=attrs.evolve(self._options, rank=rank),
            memory_bytes=np.column_stack([self._space.memory_bytes, *self._needs]),
            capacity_bytes=np.column_stack([self._space.capacity_bytes, *self._has]),
            rules=None,
            further_tiers=tuple(self._names),
        )
        return space, self._least_ms(~barred)

    def _add(self, what: str, options: Bools, has: Ints) -> None:
        """A resource that each shard of some options takes of, and what each rank has of it."""
        self._names.append(f"rule {len(self._names)}: {what}")
        self._needs.append(np.where(options[self._options.option], _NEED, 0))
        self._has.append(has)

    def _add_set(self, ranks: frozenset[int], options: Bools) -> None:
        shards = self._options.shards_per_option * self._options.multiplicity[self._options.table]
        plenty = _NEED * int(shards[options].sum()) + 1
        has = [plenty if rank in ranks else _TOO_LITTLE for rank in range(self._world_size)]
        self._add("ranks", options, np.array(has))

    def _of_tables(self, tables: Iterable[int]) -> Bools:
        """The options of some distinct tables: ``[O]``."""
        return np.isin(self._options.table, sorted(tables))

    def _seated_options(self) -> tuple[Bools, Bools]:
        """Mark options that live on their table's rank, and others of these tables that are left out: ``[O]`` each.

        Several shards of a table on one rank are no better than one; where there is no option of one, they are left
        to a resource.
        """
        of_given = self._of_tables(self._given)
        is_free = np.logical_and.reduceat(self._options.rank == FREE, self._options.first_shard[:-1])
        is_seated = of_given & (self._options.shards_per_option == 1) & is_free & self._space.fits_alone
        has_one = np.bincount(self._options.table, is_seated, len(self._options.tables)) > 0
        return is_seated, of_given & ~is_seated & has_one[self._options.table]

    def _sets(self) -> dict[frozenset[int], set[int]]:
        """The distinct tables under each set of ranks that is a resource."""
        found: dict[frozenset[int], set[int]] = {}
        is_seated, _ = self._seated_options()
        seated = set(self._options.table[is_seated].tolist())
        for table in sorted(self._rules.concerned):
            allowed, distinct = self._rules.allowed(table), int(self._options.distinct_table[table])
            allowed = allowed if distinct not in self._given else frozenset([self._given[distinct]])
            if distinct not in seated and len(allowed) < self._world_size:
                found.setdefault(allowed, set()).add(distinct)
        return found

    def _least_ms(self, usable: Bools) -> float:
        """Compute the least time of ranks that some tables must share among themselves, ms."""
        cost: Floats = np.where(usable & self._space.fits_alone, self._space.total_cost_ms, np.inf)
        least = np.minimum.reduceat(cost, self._options.first_option[:-1])
        needs: dict[frozenset[int], float] = {}
        for table in self._rules.concerned:
            distinct = int(self._options.distinct_table[table])
            given_rank = self._given.get(distinct)
            allowed = self._rules.allowed(table) if given_rank is None else frozenset([given_rank])
            needs[allowed] = needs.get(allowed, 0.0) + float(least[distinct])
        loads = (sum(need for part, need in needs.items() if part <= ranks) / len(ranks) for ranks in needs)
        return max(loads, default=0.0)
