"""Plans between the one that a model has and the one that a search found.

The plans are on two trails. One begins at the plan that was found, and takes table after table back to where it was:
first those that cost no time, then those that cost least for a byte. The other begins at the old plan, or the nearest
that fits, and takes load off the rank that has most, by the change that saves most time for a byte.

Legend: P phases, W ranks, M memory tiers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Generator, Iterator, Sequence

import numpy as np
from attrs import define, field, frozen

from shardwright.errors import PlanError
from shardwright.planning.arrays import FREE, NO_GANG, Floats, Ints
from shardwright.planning.machines.topology import GIB
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.plan.sharding import EmbeddingModuleShardingPlan, ParameterSharding
from shardwright.planning.search.objectives import OBJECTIVES, Phases
from shardwright.planning.search.placement import Placed
from shardwright.planning.search.refinements import Outcome
from shardwright.planning.tables.spec import TableSpec
from shardwright_plugins.plan_differences.compare import value_bytes
from shardwright_plugins.plan_differences.measure import Measure
from shardwright_plugins.plan_differences.rederived import matched_option
from shardwright_plugins.plan_differences.table_moves import SAME_RANK, moves_of

_MOST_STEPS = 512
"""Changes that the trail from the old plan makes at most: each takes load off one rank."""


_MOST_TABLES = 32
"""Tables of the rank with most load that are tried at each of them, those with the slowest shards first."""


_NOISE = 1e-9
"""Part of a time that differs with the order of sums."""


@frozen
class Choice:
    """A table's option, and the rank of each of its shards."""

    option: int
    ranks: tuple[int, ...]


@frozen(eq=False)
class Stop:
    """A plan on a trail, with the measure by which plans are compared, ms."""

    value_ms: float
    moved_bytes: int
    choices: tuple[Choice, ...]

    def rating(self, move_cost: float) -> tuple[float, int, float]:
        """A key by which plans are rated: of equal ones that which moves least."""
        return self.value_ms + move_cost * self.moved_bytes / GIB, self.moved_bytes, self.value_ms

    def placed(self, space: SearchSpace) -> Placed:
        """The plan, with the ranks of the shards that have none by their layout."""
        return Placed.of(
            space, *zip(*((choice.option, choice.ranks) for choice in self.choices), strict=True)
        )


def choices_of(found: Outcome) -> list[Choice] | None:
    """The plan that a search found."""
    plan = found.result.plan
    if plan is None:
        return None
    return [Choice(*pair) for pair in zip(plan.proposal.tolist(), plan.ranks_of_tables, strict=True)]


@define(eq=False)
class OldPlan:
    """The plan to stay near, in a search space.

    Args:
        measure: measure of plans, with their options and costs.
        shardings: each table's part of it; ``None`` of a new one.
        choices: its choice for each table; ``None`` of tables for which it chose no option of today.
    """

    measure: Measure
    shardings: Sequence[ParameterSharding | None]
    choices: tuple[Choice | None, ...]
    _known: dict[tuple[int, Choice], int] = field(factory=dict)

    @property
    def space(self) -> SearchSpace:
        """Options and costs."""
        return self.measure.space

    @classmethod
    def of(cls, found: Outcome, plan: ShardingPlan) -> OldPlan:
        """The plan, matched with the options of a search.

        Raises:
            PlanError: a table has another size.
        """
        space = found.space
        tables, alike = space.options.all_tables, space.options.distinct_table.tolist()
        shardings = [plan.plan.get(t.module, EmbeddingModuleShardingPlan()).get(t.name) for t in tables]
        for table, sharding in zip(tables, shardings, strict=True):
            _check_size(table, sharding)
        choices = (_matched(space, *pair) for pair in zip(alike, shardings, strict=True))
        return cls(Measure(found.performance, space), shardings, tuple(choices))

    def moved(self, table: int, choice: Choice) -> int:
        """Bytes of a table that move if it is sharded otherwise.

        Those that go to other ranks; and where its blocks are cut otherwise or have another kernel, those that go to
        the new blocks of their own rank.
        """
        sharding, was = self.shardings[table], self.choices[table]
        if sharding is None or choice == was:
            return 0
        if (table, choice) not in self._known:
            values, _ = value_bytes(self.space.options.all_tables[table], sharding)
            layout = self.space.options.layouts[choice.option].placed(choice.ranks)
            moves = moves_of(sharding.layout, layout, values, self.space.topology)
            is_same_cut = was is not None and was.option == choice.option
            self._known[table, choice] = sum(
                size for (_, link), size in moves.sent.items() if not (is_same_cut and link == SAME_RANK)
            )
        return self._known[table, choice]


def _check_size(table: TableSpec, sharding: ParameterSharding | None) -> None:
    if sharding is None:
        return
    layout = sharding.layout
    size = layout.row_map.num_rows, max(block.columns.stop for block in layout.blocks)
    if size != (table.num_embeddings, table.embedding_dim):
        raise PlanError(
            f"the plan to stay near has {size[0]} x {size[1]} elements for table {table.describe()}: it is of another "
            "model"
        )


def _matched(space: SearchSpace, distinct: int, sharding: ParameterSharding | None) -> Choice | None:
    if sharding is None or max(sharding.ranks) >= space.topology.world_size:
        return None
    option, ranks = matched_option(space.options, distinct, sharding)
    if option is None:
        return None
    has_gangs = (space.options.spread(space.options.gang, option) != NO_GANG).any()
    if has_gangs and sharding.local_world_size != space.topology.local_world_size:
        return None
    return Choice(option, tuple(ranks))


@define(eq=False)
class _Plan:
    """A plan that changes table by table, with its loads.

    Args:
        old: plan to stay near.
        choices: the choice of each table.
        loads: milliseconds, ``[P, W]``.
        used: bytes, ``[W, M]``.
        moved_bytes: bytes that move, all tables together.
    """

    old: OldPlan
    choices: list[Choice]
    loads: Floats
    used: Ints
    moved_bytes: int = 0

    @classmethod
    def of(cls, old: OldPlan, choices: Sequence[Choice]) -> _Plan:
        """A plan with its loads, added up."""
        capacity = old.space.capacity_bytes
        made = cls(old, [*choices], np.zeros((len(old.space.phases), len(capacity))), np.zeros_like(capacity))
        for table, choice in enumerate(choices):
            made._add(table, choice, 1)
        return made

    def put(self, table: int, choice: Choice) -> None:
        """Shard a table otherwise."""
        self._add(table, self.choices[table], -1)
        self._add(table, choice, 1)
        self.choices[table] = choice

    def _add(self, table: int, choice: Choice, sign: int) -> None:
        space, ranks = self.old.space, np.array(choice.ranks)
        for load, cost in zip(self.loads, space.phases.values(), strict=True):
            np.add.at(load, ranks, sign * space.on_ranks(space.options.spread(cost, choice.option), ranks))
        np.add.at(self.used, ranks, sign * space.options.spread(space.memory_bytes, choice.option))
        self.moved_bytes += sign * self.old.moved(table, choice)

    def tried(self, table: int, choice: Choice) -> _Try:
        """Numbers of the plan with a change of one table."""
        before = self.choices[table]
        self.put(table, choice)
        value = self.value_ms if self.fits else math.inf
        found = _Try(table, choice, value, self.unevenness, self.moved_bytes)
        self.put(table, before)
        return found

    @property
    def phases_ms(self) -> Phases:
        """Phase -> time of each rank: ``[W]``."""
        return dict(zip(self.old.space.phases, self.loads, strict=True))

    @property
    def value_ms(self) -> float:
        """The objective."""
        return OBJECTIVES[self.old.space.objective](self.phases_ms)

    @property
    def unevenness(self) -> float:
        """Sum of the squares of the ranks' times: it falls where load goes to a rank that has less."""
        return float(np.square(self.loads.sum(axis=0)).sum())

    @property
    def fits(self) -> bool:
        """True if it is within memory and keeps the rules."""
        space = self.old.space
        if (self.used > space.capacity_bytes).any():
            return False
        return space.rules is None or not space.rules.broken({t: c.ranks for t, c in enumerate(self.choices)})

    def stop(self) -> Stop:
        """The plan as it is now."""
        chosen = np.array([choice.option for choice in self.choices])
        return Stop(self.old.measure.of(self.phases_ms, chosen), self.moved_bytes, tuple(self.choices))


@frozen
class _Try:
    """A change of one table, and the plan's numbers after it; one that does not fit takes infinite time."""

    table: int
    choice: Choice
    value_ms: float
    unevenness: float
    moved_bytes: int

    def saved(self, value_ms: float, unevenness: float, moved_bytes: int) -> tuple[float, float]:
        """Part of the time that is saved for each new byte that moves, and evenness; noise of sums saves no time."""
        new_bytes = max(self.moved_bytes - moved_bytes, 0) + 1
        return round(1 - self.value_ms / value_ms, 9) / new_bytes, (unevenness - self.unevenness) / new_bytes


def stops_of(old: OldPlan, found: list[Choice] | None) -> Iterator[Stop]:
    """The plans on both trails; none where nothing was found and the old plan is none here."""
    start = None if found is None else (yield from _back(_Plan.of(old, found)))
    kept = [choice for choice in old.choices if choice is not None]
    if len(kept) == len(old.choices) and (whole := _Plan.of(old, kept)).fits:
        start = whole
    if start is not None:
        yield from _forth(start, found)


def _back(plan: _Plan) -> Generator[Stop, None, _Plan]:
    """A plan that was found, and from it table after table as it was; returns the last."""
    yield plan.stop()
    renamed = _Plan.of(plan.old, _renamed(plan.old, plan.choices))
    if renamed.fits and renamed.moved_bytes < plan.moved_bytes:
        plan = renamed
        yield plan.stop()
    for is_free in (True, False):  # of time that is lost
        for table, was in _changed(plan):
            after = plan.tried(table, was)
            if after.value_ms <= (plan.value_ms if is_free else sys.float_info.max):
                plan.put(table, was)
                yield plan.stop()
    return plan


def _changed(plan: _Plan) -> list[tuple[int, Choice]]:
    """Tables that are not as they were, and how they were: those first that lose least time for a byte."""
    value, moved = plan.value_ms, plan.moved_bytes
    pairs = zip(plan.choices, plan.old.choices, strict=True)
    tries = [plan.tried(t, was) for t, (now, was) in enumerate(pairs) if was is not None and now != was]
    tries.sort(key=lambda after: ((after.value_ms - value) / (moved - after.moved_bytes + 1), after.table))
    return [(after.table, after.choice) for after in tries]


def _forth(plan: _Plan, found: list[Choice] | None) -> Iterator[Stop]:
    """A plan, and from it load off the rank that has most: what saves most time for a byte comes first."""
    yield plan.stop()
    for _ in range(_MOST_STEPS):
        value, uneven, moved = plan.value_ms, plan.unevenness, plan.moved_bytes

        tries = [plan.tried(table, choice) for table, choice in _changes(plan, found)]
        better = [
            after
            for after in tries
            if after.value_ms <= value * (1 + _NOISE) and after.unevenness < uneven * (1 - _NOISE)
        ]
        if not better:
            return
        best = max(better, key=lambda after: after.saved(value, uneven, moved))
        plan.put(best.table, best.choice)
        yield plan.stop()


def _changes(plan: _Plan, found: list[Choice] | None) -> Iterator[tuple[int, Choice]]:
    """Changes of tables on the rank with most load: as in the plan found, or one shard to the rank with least."""
    space, loads = plan.old.space, plan.loads.sum(axis=0)
    most, least = int(np.argmax(loads)), int(np.argmin(loads))
    is_free = (space.options.rank == FREE) & (space.options.gang == NO_GANG)
    here = [table for table, choice in enumerate(plan.choices) if most in choice.ranks]
    here.sort(key=lambda table: (-space.largest_cost_ms[plan.choices[table].option], table))
    for table in here[:_MOST_TABLES]:
        choice = plan.choices[table]
        if found is not None and found[table] != choice:
            yield table, found[table]
        for place in np.flatnonzero(space.options.spread(is_free, choice.option)).tolist():
            if choice.ranks[place] == most:
                ranks = (*choice.ranks[:place], least, *choice.ranks[place + 1 :])
                yield table, Choice(choice.option, ranks)


def _renamed(old: OldPlan, found: Sequence[Choice]) -> list[Choice]:
    """A plan with ranks renamed, so that shards that may go anywhere are where most of their bytes are.

    Ranks of one speed are matched greedily, those first that have most bytes in common.
    """
    options, world_size = old.space.options, old.space.topology.world_size
    is_fixed = (options.rank != FREE) | (options.gang != NO_GANG)
    may_move = [not options.spread(is_fixed, choice.option).any() for choice in found]
    common = np.zeros((world_size, world_size), dtype=np.int64)
    for choice, was, is_free in zip(found, old.choices, may_move, strict=True):
        if is_free and was is not None and was.option == choice.option:
            sizes = options.spread(old.space.memory_bytes.sum(axis=1), choice.option)
            np.add.at(common, (np.array(choice.ranks), np.array(was.ranks)), sizes)
    name: dict[int, int] = {}
    order = np.argsort(-common, axis=None, kind="stable")
    for rank, other in zip(*(index.tolist() for index in np.unravel_index(order, common.shape)), strict=True):
        is_alike = old.space.topology.speeds[rank] == old.space.topology.speeds[other]
        if is_alike and rank not in name and other not in name.values():
            name[rank] = other
    return [
        Choice(choice.option, tuple(name[rank] for rank in choice.ranks)) if is_free else choice
        for choice, is_free in zip(found, may_move, strict=True)
    ]
