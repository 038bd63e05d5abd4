"""Plans near another plan: what moves to get there costs as much as so many milliseconds of a step.

A search rates plans by their time alone. Here some plans between the old one and the one that it found are rated by
``t + c m``: ``t`` the objective, ms, ``m`` what moves, GiB, ``c`` the cost of a move. Which plans these are does not
depend on ``c``. So a dearer move never moves more bytes, and never gives a faster step: of the least of ``t + c m``
over a fixed set, ``m`` falls and ``t`` rises with ``c``.

The plans are on two trails. One begins at the plan that was found, and takes table after table back to where it was:
first those that cost no time, then those that cost least for a byte. The other begins at the old plan, or the nearest
that fits, and takes load off the rank that has most, by the change that saves most time for a byte.

Legend: A tables, P phases, W ranks, M memory tiers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np
from attrs import define, field, frozen

from shardwright.arguments import brief
from shardwright.errors import InvalidInputError, PlanError, ShardwrightError
from shardwright.host.plugin_host import PluginHost
from shardwright.planning.arrays import FREE, NO_GANG, Floats, Ints
from shardwright.planning.machines.topology import GIB, InputValue
from shardwright.planning.options.moving import ValueBytes, weight_bits
from shardwright.planning.options.options import Options
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.plan.plan import ParameterSharding, ShardingPlan
from shardwright.planning.report.moves import SAME_RANK, TableMoves
from shardwright.planning.report.rederived import matched_option, placed_plan
from shardwright.planning.search.objectives import OBJECTIVES
from shardwright.planning.search.placement import Feedback, ranks_of_tables
from shardwright.planning.search.search import SearchResult
from shardwright.planning.tables.spec import TableSpec
from shardwright.planning.text import bytes_text

_MOST_STEPS = 512
"""Changes that the trail from the old plan makes at most: each takes load off one rank."""
_MOST_TABLES = 32
"""Tables of the rank with most load that are tried at each of them, the dearest first."""


@frozen
class StayNear:
    """A plan to stay near.

    Args:
        plan: the plan.
        move_cost: milliseconds that the step must become shorter by for each GiB that moves.

    Raises:
        InvalidInputError: it is no plan, or the cost is negative or not finite.
    """

    plan: ShardingPlan
    move_cost: float = 0.0

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.plan, ShardingPlan):
            raise InvalidInputError(f"stay_near must be a ShardingPlan, got {brief(self.plan)}")
        is_number = isinstance(self.move_cost, int | float) and not isinstance(self.move_cost, bool)
        if not (is_number and 0 <= self.move_cost < math.inf):
            raise InvalidInputError(
                "move_cost is the milliseconds that a step must become shorter by for each GiB that moves, a finite "
                f"number from 0; got {self.move_cost!r}"
            )

    @classmethod
    def of(cls, plan: ShardingPlan | None, move_cost: float | None) -> StayNear | None:
        """Wish of a user; ``None`` where there is none.

        Raises:
            InvalidInputError: there is a cost and no plan, or what is given is wrong.
        """
        if plan is None:
            if move_cost is not None:
                raise InvalidInputError("move_cost is what moves away from a plan cost: give stay_near, too")
            return None
        return cls(plan, 0.0 if move_cost is None else move_cost)


@frozen
class Stayed:
    """Outcome of staying near a plan.

    Args:
        move_cost: see :class:`StayNear`.
        moved_bytes: bytes that move: weights and optimizer states.
        fastest_ms: value of the fastest plan that was found.
        fastest_moved_bytes: bytes that move for that.
        old_ms: value of the plan to stay near; ``None`` if it is none here.
    """

    move_cost: float
    moved_bytes: int
    fastest_ms: float
    fastest_moved_bytes: int
    old_ms: float | None

    def to_data(self) -> dict[str, dict[str, Any]]:
        """Return what a plan document says of it among its inputs, JSON data."""
        values = {
            "move_cost_ms_per_gib": InputValue(self.move_cost, "given"),
            "moved_bytes": InputValue(self.moved_bytes, "measured"),
            "fastest_ms": InputValue(self.fastest_ms, "measured"),
        }
        return {name: value.to_data() for name, value in values.items()}

    def __str__(self) -> str:
        """``stays near a plan, at 0.5 ms for each GiB that moves: 1.2 GiB do; ...``."""
        old = "it cannot be kept" if self.old_ms is None else f"it takes {self.old_ms:.4g} ms"
        return (
            f"near the plan to stay near ({old}), at {self.move_cost:.4g} ms for each GiB: "
            f"{bytes_text(self.moved_bytes)} move; the fastest plan found takes {self.fastest_ms:.4g} ms and moves "
            f"{bytes_text(self.fastest_moved_bytes)}"
        )


@frozen
class _Choice:
    """A table's option, and the rank of each of its shards."""

    option: int
    ranks: tuple[int, ...]


_Choices: TypeAlias = tuple[_Choice, ...]


@frozen(eq=False)
class _Stop:
    """A plan on a trail."""

    value_ms: float
    moved_bytes: int
    choices: _Choices = field(repr=False)

    def cost(self, move_cost: float) -> tuple[float, int, float]:
        """A key by which plans are rated: of equal ones that which moves least."""
        return self.value_ms + move_cost * self.moved_bytes / GIB, self.moved_bytes, self.value_ms


def stay_near(
    space: SearchSpace, result: SearchResult, near: StayNear, plugin_host: PluginHost
) -> tuple[SearchResult, Stayed | None]:
    """The result of a search, with the plan that is best when moves count.

    Args:
        space: options, costs, capacities.
        result: result of the search; it may have found nothing.
        near: plan to stay near, and the cost of a move.
        plugin_host: registries of installed plugins.

    Raises:
        PlanError: a table of the plan to stay near has another size.
    """
    old = _OldPlan.of(space, near.plan, plugin_host)
    trails = _Trails(space, old)
    found = _found(space, result)
    stops = [*trails.back(found), *trails.forth(found)] if found else list(trails.forth(None))
    if not stops:
        return result, None
    fastest, best = (min(stops, key=lambda stop, c=c: stop.cost(c)) for c in (0.0, near.move_cost))  # type: ignore[misc]
    kept = next((stop.value_ms for stop in stops if stop.choices == old.choices), None)
    outcome = Stayed(near.move_cost, best.moved_bytes, fastest.value_ms, fastest.moved_bytes, kept)
    return _with_plan(space, result, best.choices), outcome


def _found(space: SearchSpace, result: SearchResult) -> _Choices | None:
    if result.proposal is None or result.feedback.ranks is None:
        return None
    ranks = ranks_of_tables(space, result.proposal, result.feedback.ranks)
    return tuple(_Choice(*pair) for pair in zip(result.proposal.tolist(), ranks, strict=True))


def _with_plan(space: SearchSpace, result: SearchResult, choices: _Choices) -> SearchResult:
    proposal = np.array([choice.option for choice in choices], dtype=np.int64)
    plan = placed_plan(space, proposal, [choice.ranks for choice in choices])
    feedback = Feedback(plan.ranks, plan.load_ms, plan.used_bytes, plan.value_ms)
    proven = attrs.evolve(result.proven, bound_ms=min(result.proven.bound_ms, plan.value_ms))
    return attrs.evolve(result, proposal=proposal, feedback=feedback, proven=proven, misfit=None)


@define(eq=False)
class _OldPlan:
    """The plan to stay near, in a search space.

    Args:
        space: options and costs.
        shardings: each table's part of it; ``None`` of a new one.
        values: bytes of each table's values.
        choices: its choice for each table; ``None`` of tables for which it chose no option of today.
    """

    space: SearchSpace
    shardings: Sequence[ParameterSharding | None]
    values: Sequence[ValueBytes]
    choices: tuple[_Choice | None, ...]
    _known: dict[tuple[int, _Choice], int] = field(factory=dict)

    @classmethod
    def of(cls, space: SearchSpace, plan: ShardingPlan, plugin_host: PluginHost) -> _OldPlan:
        """The plan, matched with the options.

        Raises:
            PlanError: a table has another size.
        """
        options = space.options
        shardings = [
            plan.plan[table.module].get(table.name) if table.module in plan.plan else None
            for table in options.all_tables
        ]
        pairs = list(zip(options.all_tables, shardings, strict=True))
        for table, sharding in pairs:
            _check_size(table, sharding)
        choices = [
            _matched(space, distinct, sharding)
            for sharding, distinct in zip(shardings, options.distinct_table.tolist(), strict=True)
        ]
        values = [_value_bytes(table, sharding, plugin_host) for table, sharding in pairs]
        return cls(space, shardings, values, tuple(choices))

    def moved(self, table: int, choice: _Choice) -> int:
        """Bytes of a table that move if it is sharded otherwise.

        Those that go to other ranks; and where its blocks are cut otherwise or have another kernel, those that go to
        the new blocks of their own rank.
        """
        sharding = self.shardings[table]
        if sharding is None or choice == self.choices[table]:
            return 0
        if (table, choice) not in self._known:
            self._known[table, choice] = self._count(table, sharding, choice)
        return self._known[table, choice]

    def _count(self, table: int, sharding: ParameterSharding, choice: _Choice) -> int:
        mine = self.choices[table]
        layout = self.space.options.layouts[choice.option].placed(choice.ranks)
        moves = TableMoves.of(sharding.layout, layout, self.values[table], self.space.topology)
        is_same_cut = mine is not None and mine.option == choice.option
        return sum(size for (_, link), size in moves.sent.items() if not (is_same_cut and link == SAME_RANK))


def _matched(space: SearchSpace, distinct: int, sharding: ParameterSharding | None) -> _Choice | None:
    if sharding is None or max(sharding.ranks) >= space.topology.world_size:
        return None
    option, ranks = matched_option(space.options, distinct, sharding)
    if option is None or not _keeps_gangs(space, option, ranks):
        return None
    return _Choice(option, tuple(ranks))


def _keeps_gangs(space: SearchSpace, option: int, ranks: Sequence[int]) -> bool:
    """True if the shards that share a host do, on the ranks of it that they must have."""
    options, local = space.options, space.topology.local_world_size
    hosts: dict[int, int] = {}
    runs, place = options.shards_of(option), 0
    for run in range(runs.start, runs.stop):
        for index in range(int(options.count[run])):
            host, on_host = divmod(ranks[place + index], local)
            gang, first = int(options.gang[run]), int(options.local_rank[run])
            if gang != NO_GANG and hosts.setdefault(gang, host) != host:
                return False
            if first != FREE and on_host != first + index:
                return False
        place += int(options.count[run])
    return True


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


def _value_bytes(table: TableSpec, sharding: ParameterSharding | None, plugin_host: PluginHost) -> ValueBytes:
    if sharding is None:
        return ValueBytes(weight_bits(table))
    try:
        kernel = plugin_host.compute_kernels.create(sharding.compute_kernel)
        return ValueBytes.of(table, kernel, sharding.device_on(sharding.ranks[0]))
    except ShardwrightError:  # a plugin that is not installed here: weights alone are counted
        return ValueBytes(weight_bits(table))


@define(eq=False)
class _ChangingPlan:
    """A plan that changes table by table, with its loads.

    Args:
        old: plan to stay near.
        choices: the choice of each table.
        loads: milliseconds, ``[P, W]``.
        used: bytes, ``[W, M]``.
        moved_bytes: bytes that move, all tables together.
    """

    old: _OldPlan
    choices: list[_Choice]
    loads: Floats
    used: Ints
    moved_bytes: int = 0

    @classmethod
    def of(cls, old: _OldPlan, choices: Sequence[_Choice]) -> _ChangingPlan:
        """A plan with its loads, added up."""
        space = old.space
        loads = np.zeros((len(space.phases), len(space.capacity_bytes)))
        made = cls(old, list(choices), loads, np.zeros_like(space.capacity_bytes))
        for table, choice in enumerate(choices):
            made._add(table, choice, 1)
        return made

    def put(self, table: int, choice: _Choice) -> None:
        """Shard a table otherwise."""
        self._add(table, self.choices[table], -1)
        self._add(table, choice, 1)
        self.choices[table] = choice

    def _add(self, table: int, choice: _Choice, sign: int) -> None:
        space = self.old.space
        runs, ranks = space.options.shards_of(choice.option), np.array(choice.ranks)
        shards = np.repeat(np.arange(runs.start, runs.stop), space.options.count[runs])
        for load, cost in zip(self.loads, space.phases.values(), strict=True):
            np.add.at(load, ranks, sign * cost[shards])
        np.add.at(self.used, ranks, sign * space.memory_bytes[shards])
        self.moved_bytes += sign * self.old.moved(table, choice)

    def tried(self, table: int, choice: _Choice) -> _Try | None:
        """Numbers of the plan with a change of one table; ``None`` if it does not fit."""
        before = self.choices[table]
        self.put(table, choice)
        found = _Try(table, choice, self.value_ms, self.unevenness, self.moved_bytes) if self.fits else None
        self.put(table, before)
        return found

    @property
    def value_ms(self) -> float:
        """The objective."""
        space = self.old.space
        return OBJECTIVES[space.objective](dict(zip(space.phases, self.loads, strict=True)))

    @property
    def rank_ms(self) -> Floats:
        """Time of each rank: ``[W]``."""
        total: Floats = self.loads.sum(axis=0)
        return total

    @property
    def unevenness(self) -> float:
        """Sum of the squares of the ranks' times: it falls where load goes to a rank that has less."""
        return float(np.square(self.rank_ms).sum())

    @property
    def fits(self) -> bool:
        """True if it is within memory and keeps the rules."""
        space = self.old.space
        if (self.used > space.capacity_bytes).any():
            return False
        ranks = {table: choice.ranks for table, choice in enumerate(self.choices)} if space.rules else {}
        return space.rules is None or not space.rules.broken(ranks)

    def stop(self) -> _Stop:
        """The plan as it is now."""
        return _Stop(self.value_ms, self.moved_bytes, tuple(self.choices))


@frozen
class _Try:
    """A change of one table, and the plan's numbers after it."""

    table: int
    choice: _Choice
    value_ms: float
    unevenness: float
    moved_bytes: int


@frozen(eq=False)
class _Trails:
    """Plans between an old one and one that was found."""

    space: SearchSpace
    old: _OldPlan

    def back(self, found: _Choices) -> Iterator[_Stop]:
        """The plan that was found, and from it table after table as it was."""
        placement = _ChangingPlan.of(self.old, found)
        yield placement.stop()
        relabelled = _ChangingPlan.of(self.old, _relabelled(self.old, found))
        if relabelled.fits and relabelled.moved_bytes < placement.moved_bytes:
            placement = relabelled
            yield placement.stop()
        for is_free in (True, False):
            for table in self._in_order(placement, is_free=is_free):
                choice, value = self.old.choices[table], placement.value_ms
                after = None if choice is None else placement.tried(table, choice)
                if after is not None and (not is_free or after.value_ms <= value):
                    placement.put(table, after.choice)
                    yield placement.stop()

    def _in_order(self, placement: _ChangingPlan, *, is_free: bool) -> list[int]:
        """Tables that are not as they were: the most bytes first, or the least time for a byte."""
        pairs = enumerate(zip(placement.choices, self.old.choices, strict=True))
        tables = [table for table, (now, was) in pairs if was is not None and now != was]
        moved = {table: self.old.moved(table, placement.choices[table]) for table in tables}
        if is_free:
            return sorted(tables, key=lambda table: (-moved[table], table))
        tries = {table: placement.tried(table, self._was(table)) for table in tables}
        value = placement.value_ms
        slower = {t: (math.inf if after is None else after.value_ms - value) for t, after in tries.items()}
        return sorted(tables, key=lambda table: (slower[table] / (moved[table] + 1), table))

    def _was(self, table: int) -> _Choice:
        choice = self.old.choices[table]
        assert choice is not None  # asked before
        return choice

    def forth(self, found: _Choices | None) -> Iterator[_Stop]:
        """The old plan, or what comes nearest, and from it load off the rank that has most."""
        placement = self._nearest(found)
        if placement is None or not placement.fits:
            return
        yield placement.stop()
        for _ in range(_MOST_STEPS):
            best = self._best_step(placement, found)
            if best is None:
                return
            placement.put(best.table, best.choice)
            yield placement.stop()

    def _nearest(self, found: _Choices | None) -> _ChangingPlan | None:
        """The old plan where it is one; else the last stop of the other trail."""
        kept = [choice for choice in self.old.choices if choice is not None]
        if len(kept) == len(self.old.choices):
            whole = _ChangingPlan.of(self.old, kept)
            if whole.fits:
                return whole
        if found is None:
            return None
        *_, last = self.back(found)
        return _ChangingPlan.of(self.old, last.choices)

    def _best_step(self, placement: _ChangingPlan, found: _Choices | None) -> _Try | None:
        """The change that saves most time for a byte; where none saves time, that which evens the loads out most."""
        value, uneven, moved = placement.value_ms, placement.unevenness, placement.moved_bytes
        tries = [
            after
            for table, choice in self._changes(placement, found)
            if (after := placement.tried(table, choice)) is not None
            # A part of a thousand millionth is noise of the order of sums.
            and after.value_ms <= value * (1 + 1e-9)
            and after.unevenness < uneven * (1 - 1e-9)
        ]

        def saved(after: _Try) -> tuple[float, float]:
            new_bytes = max(after.moved_bytes - moved, 0) + 1
            time = value - after.value_ms if after.value_ms < value * (1 - 1e-9) else 0.0
            return time / new_bytes, (uneven - after.unevenness) / new_bytes

        return max(tries, key=saved, default=None)

    def _changes(self, placement: _ChangingPlan, found: _Choices | None) -> Iterator[tuple[int, _Choice]]:
        """Changes of tables on the rank with most load: as in the plan found, or one shard to the rank with least."""
        loads = placement.rank_ms
        hot, cold = int(np.argmax(loads)), int(np.argmin(loads))
        here = [t for t, choice in enumerate(placement.choices) if hot in choice.ranks]
        cost = self.space.largest_cost_ms
        here.sort(key=lambda table: (-cost[placement.choices[table].option], table))
        for table in here[:_MOST_TABLES]:
            choice = placement.choices[table]
            if found is not None and found[table] != choice:
                yield table, found[table]
            for place in self._free_places(choice, hot):
                ranks = (*choice.ranks[:place], cold, *choice.ranks[place + 1 :])
                yield table, _Choice(choice.option, ranks)

    def _free_places(self, choice: _Choice, rank: int) -> list[int]:
        """Shards on a rank that may go to any other."""
        options = self.space.options
        is_free = options.spread((options.rank == FREE) & (options.gang == NO_GANG), choice.option)
        return [place for place in np.flatnonzero(is_free).tolist() if choice.ranks[place] == rank]


def _relabelled(old: _OldPlan, found: _Choices) -> _Choices:
    """The plan found with ranks renamed, so that shards that may go anywhere are where most of their rows are.

    Ranks are matched greedily, those first that have most bytes in common.
    """
    options, world_size = old.space.options, old.space.topology.world_size
    may_go = [_may_go_anywhere(options, choice.option) for choice in found]
    common = np.zeros((world_size, world_size), dtype=np.int64)
    for table, (choice, is_free) in enumerate(zip(found, may_go, strict=True)):
        was = old.choices[table]
        if is_free and was is not None and was.option == choice.option:
            sizes = options.spread(old.space.memory_bytes.sum(axis=1), choice.option)
            np.add.at(common, (np.array(choice.ranks), np.array(was.ranks)), sizes)
    name = _matched_ranks(common)
    return tuple(
        _Choice(choice.option, tuple(name[rank] for rank in choice.ranks)) if is_free else choice
        for choice, is_free in zip(found, may_go, strict=True)
    )


def _may_go_anywhere(options: Options, option: int) -> bool:
    runs = options.shards_of(option)
    return bool(((options.rank[runs] == FREE) & (options.gang[runs] == NO_GANG)).all())


def _matched_ranks(common: Ints) -> list[int]:
    """Another rank for each rank, each once."""
    name: dict[int, int] = {}
    taken: set[int] = set()
    order = np.argsort(-common, axis=None, kind="stable")
    for rank, other in zip(*(index.tolist() for index in np.unravel_index(order, common.shape)), strict=True):
        if rank not in name and other not in taken:
            name[rank] = other
            taken.add(other)
    return [name[rank] for rank in range(len(common))]
