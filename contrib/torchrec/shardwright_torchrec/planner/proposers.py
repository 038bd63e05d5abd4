"""TorchRec's proposers, and scripts' own in shardwright's planner."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

import shardwright as sw
from shardwright_torchrec.parallel.kernel_names import fused_kernels
from shardwright_torchrec.planner.columns import options_of, set_costs
from shardwright_torchrec.planner.topologies import devices_of
from shardwright_torchrec.planner.types import Enumerator, Proposer, ShardingOption

__all__ = [
    "DynamicProgrammingProposer",
    "EmbeddingOffloadScaleupProposer",
    "GreedyProposer",
    "GridSearchProposer",
    "OwnProposer",
    "UniformProposer",
]


class _Listed(Proposer):
    """A proposer whose proposals follow from the search space alone.

    Attributes:
        plugin: name of shardwright's proposer of the same idea, which the planner takes in place of this class.
    """

    plugin: ClassVar[str]
    _proposals: Iterator[list[ShardingOption]] = iter(())

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Begin a search among options of all tables."""
        tables: dict[str, list[ShardingOption]] = {}
        for option in search_space:
            tables.setdefault(option.fqn, []).append(option)
        self._proposals = self._walk(list(tables.values()))
        self._next: list[ShardingOption] | None = next(self._proposals, None)

    def propose(self) -> list[ShardingOption] | None:
        """An option of each table; the same until `feedback` was given; none at the end."""
        return self._next

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: sw.Topology | None = None,
    ) -> None:
        """Go on to the next proposal."""
        self._next = next(self._proposals, None)

    def _walk(self, tables: Sequence[list[ShardingOption]]) -> Iterator[list[ShardingOption]]:
        """The proposals, of each table's options."""
        raise NotImplementedError


def _largest_bytes(option: ShardingOption) -> tuple[int, int]:
    """Memory of an option's largest shard, bytes, the device's first."""
    return max(((s.storage.hbm, s.storage.ddr) for s in option.shards if s.storage), default=(0, 0))


def _rate(option: ShardingOption, use_depth: bool) -> float:
    """Time of an option's slowest shard, or of all, ms."""
    times = [shard.perf.total for shard in option.shards if shard.perf]
    return max(times, default=0.0) if use_depth else sum(times)


class GreedyProposer(_Listed):
    """Takes each table's fastest option first, then moves the table with the largest shard on to its next option.

    Args:
        use_depth: options are rated by their slowest shard; else by all shards together.
        threshold: most proposals; no limit by default.
    """

    plugin: ClassVar[str] = "greedy"

    def __init__(self, use_depth: bool = True, threshold: int | None = None) -> None:
        self._use_depth, self._threshold = use_depth, threshold

    def _walk(self, tables: Sequence[list[ShardingOption]]) -> Iterator[list[ShardingOption]]:
        return itertools.islice(self._descent(tables), self._threshold)

    def _descent(self, tables: Sequence[list[ShardingOption]]) -> Iterator[list[ShardingOption]]:
        ranked = [sorted(own, key=lambda option: _rate(option, self._use_depth)) for own in tables]
        at = [0] * len(ranked)
        while True:
            proposal = [own[place] for own, place in zip(ranked, at, strict=True)]
            yield proposal
            movable = [table for table, own in enumerate(ranked) if at[table] + 1 < len(own)]
            if not movable:
                return
            at[max(movable, key=lambda table: _largest_bytes(proposal[table]))] += 1


class UniformProposer(_Listed):
    """Takes one sharding type for all tables, each in turn.

    Args:
        use_depth: options are rated by their slowest shard; else by all shards together.
    """

    plugin: ClassVar[str] = "uniform"

    def __init__(self, use_depth: bool = True) -> None:
        self._use_depth = use_depth

    def _walk(self, tables: Sequence[list[ShardingOption]]) -> Iterator[list[ShardingOption]]:
        kinds = dict.fromkeys(option.sharding_type for own in tables for option in own)
        for kind in kinds:
            offered = [[option for option in own if option.sharding_type == kind] for own in tables]
            if all(offered):
                yield [min(own, key=lambda option: _rate(option, self._use_depth)) for own in offered]


class EmbeddingOffloadScaleupProposer(GreedyProposer):
    """Stands for plans whose caches of rows on the device grow until it is full.

    The planner that gets it plans with its other proposers, or as it does by default, and gives the memory that is left
    to the caches (`refinements=["scale_up_caches"]`). As a proposer by itself it does as `GreedyProposer`.

    Args:
        use_depth: options are rated by their slowest shard; else by all shards together.
    """

    def __init__(self, use_depth: bool = True) -> None:
        super().__init__(use_depth)


class GridSearchProposer(_Listed):
    """Takes every combination of the tables' options.

    Args:
        max_proposals: nothing is proposed where there are more combinations.
    """

    plugin: ClassVar[str] = "grid_search"

    def __init__(self, max_proposals: int = 10000) -> None:
        self._max_proposals = max_proposals

    def _walk(self, tables: Sequence[list[ShardingOption]]) -> Iterator[list[ShardingOption]]:
        if np.prod([float(len(own)) for own in tables]) > self._max_proposals:
            return
        yield from map(list, itertools.product(*tables))


class DynamicProgrammingProposer(_Listed):
    """Takes the options of least memory, then those of least time in all for every amount of memory.

    Args:
        hbm_bins_per_device: amounts of memory that are told apart.
    """

    plugin: ClassVar[str] = "dynamic_programming"

    def __init__(self, hbm_bins_per_device: int = 100) -> None:
        self._bins = max(hbm_bins_per_device, 1)
        self._device_bytes: list[int] = []

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: sw.Topology | None = None,
    ) -> None:
        """Go on to the next proposal; the first devices given set the amounts of memory that are told apart."""
        if storage_constraint is not None:
            self._device_bytes = [device.storage.hbm for device in devices_of(storage_constraint)]
        super().feedback(partitionable, plan, perf_rating, storage_constraint)

    def _walk(self, tables: Sequence[list[ShardingOption]]) -> Iterator[list[ShardingOption]]:
        least = [min(own, key=_total_bytes) for own in tables]
        yield least
        for chosen in self._fastest(tables):
            if chosen != least:
                yield chosen

    def _fastest(self, tables: Sequence[list[ShardingOption]]) -> Iterator[list[ShardingOption]]:
        """The fastest proposal of each amount of memory, the largest first."""
        most = sum(max(sum(_total_bytes(option)) for option in own) for own in tables)
        devices = [own for own in self._device_bytes if own]
        bytes_of_bin = (sum(devices) or most) / (self._bins * max(len(devices), 1))
        best: dict[int, tuple[float, list[ShardingOption]]] = {0: (0.0, [])}
        for own in tables:
            following: dict[int, tuple[float, list[ShardingOption]]] = {}
            for used, (time, chosen) in best.items():
                for option in own:
                    filled = used + round(sum(_total_bytes(option)) / max(bytes_of_bin, 1))
                    found = (time + option.total_perf, [*chosen, option])
                    if filled not in following or found[0] < following[filled][0]:
                        following[filled] = found
            best = following
        for _, (_, chosen) in sorted(best.items(), reverse=True):
            yield chosen


def _total_bytes(option: ShardingOption) -> tuple[int, int]:
    return option.total_storage.hbm, option.total_storage.ddr


class OwnProposer(sw.Proposer):
    """A proposer that a script has written.

    Args:
        proposer: the script's.
    """

    name: ClassVar[str] = "own_proposer"

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer

    def proposals(self, space: sw.SearchSpace, watch: sw.Watch) -> sw.Proposals:
        """The script's proposals, with what became of them."""
        found = listed(space)
        tables = [option.fqn for own in found for option in own[:1]]
        self.proposer.load([option for own in found for option in own])
        while (proposal := self.proposer.propose()) is not None:
            chosen = {option.fqn: option.index for option in proposal}
            if set(chosen) != set(tables) or len(proposal) != len(tables) or min(chosen.values()) < 0:
                raise sw.PlanningError(
                    f"{type(self.proposer).__name__}.propose() must give one option of the search space for each of "
                    f"{len(tables)} tables, it gave {proposal!r}"
                )
            feedback = yield np.array([chosen[name] for name in tables], dtype=np.int64)
            fits = feedback.plan is not None
            self.proposer.feedback(fits, proposal, feedback.value_ms if fits else None, space.topology)


def listed(space: sw.SearchSpace, *, every: bool = False) -> list[list[ShardingOption]]:
    """The options of each of all tables, with their costs.

    Args:
        space: columns of all options.
        every: list all compute kernels that TorchRec calls `fused`; else the one that planners prefer.
    """
    options = space.options
    memory = {tier: space.memory_bytes[:, number] for number, tier in enumerate(space.tiers)}
    found = [
        options_of(options, table, number) for number, table in enumerate(options.distinct_table.tolist())
    ]
    for own in found:
        set_costs(own, options, space.phases, memory)
    return found if every else [_preferred(own) for own in found]


def _preferred(options: Sequence[ShardingOption]) -> list[ShardingOption]:
    """The options of a table, of those that TorchRec cannot tell apart the one whose kernel is preferred."""
    order = fused_kernels()
    found: dict[object, ShardingOption] = {}
    for option in options:
        cuts = tuple((tuple(shard.size), tuple(shard.offset)) for shard in option.shards)
        key = (option.sharding_type, option.compute_kernel, option.partition_by, cuts)
        other = found.setdefault(key, option)
        if option.own_kernel in order and order.index(option.own_kernel) < order.index(other.own_kernel):
            found[key] = option
    return list(found.values())
