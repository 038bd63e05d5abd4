"""The refinement `scale_up_caches`: larger caches for tables that are kept elsewhere than on the device.

TorchRec has a proposer for this (``EmbeddingOffloadScaleupProposer``). Here the plan's free memory is given out in
steps to the table that gains most by a byte, and the tables are planned again with these caches. The better plan is
taken.

Legend: W ranks, A tables.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import attrs
import numpy as np
from attrs import frozen

from shardwright.contracts.compute_kernel import ComputeKernel, KernelRequest
from shardwright.errors import NoPlanError
from shardwright.planning.arrays import Ints
from shardwright.planning.machines.given import main_device
from shardwright.planning.options.inputs import Request
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.search.loaded import LoadedPlan
from shardwright.planning.search.refinements import Outcome, Refinement, Search
from shardwright.planning.tables.caching import CacheParams
from shardwright.planning.tables.constraints import Constraints, ParameterConstraints
from shardwright.planning.tables.spec import TableSpec
from shardwright.planning.watch import Watch
from shardwright_plugins.plan_differences.value_bytes import weight_bits

_STEPS = 32
"""Sizes that are tried for each table, from the one that was asked for to the whole table."""
_DEVICE = "device"


_FIRST_SEARCH_SHARE = 0.5
"""Part of the time and the work that the first search may use."""


def refinement() -> Refinement:
    """The refinement, which takes no arguments."""
    return scale_up_caches


def scale_up_caches(search: Search, request: Request, watch: Watch) -> Outcome:
    """Search, and once more with caches that fill the device memory that the plan leaves free.

    Args:
        search: the search.
        request: constraints and ranks; the second search has other caches in its constraints.
        watch: the watch over both.
    """
    first = search(request, watch.share(_FIRST_SEARCH_SHARE))
    if first.result.plan is None or not (caches := _larger_caches(first.result.plan)):
        return first
    rules = request.constraints.rules
    none = ParameterConstraints()
    changed = {
        path: attrs.evolve(rules.get(path, none), cache_params=cache) for path, cache in caches.items()
    }
    larger = attrs.evolve(request, constraints=Constraints({**rules, **changed}))
    try:
        again = search(larger, watch)
    except NoPlanError:
        return first
    return min(first, again, key=lambda found: found.result.value_ms)


@frozen(eq=False)
class _CachedTable:
    """A table behind a cache, as a plan has it.

    Args:
        spec: the table.
        kernel: its compute kernel.
        lookups: distinct rows that it looks up in a step, or what is nearest to that.
        shards: rank, rows and request of each of its shards.
    """

    spec: TableSpec
    kernel: ComputeKernel
    lookups: float
    shards: tuple[tuple[int, int, KernelRequest], ...]

    def cache(self, step: int) -> CacheParams:
        """The cache after so many steps towards the whole table."""
        held = self.spec.cache.held
        return attrs.evolve(self.spec.cache, load_factor=held + (1 - held) * step / _STEPS)

    def device_bytes(self, step: int, world_size: int) -> Ints:
        """Device memory on each rank, ``[W]``."""
        taken: Ints = np.zeros(world_size, dtype=np.int64)
        for rank, rows, request in self.shards:
            asked = attrs.evolve(request, cache=self.cache(step))
            taken[rank] += self.kernel.memory_bytes(asked, rows).get(_DEVICE, 0)
        return taken

    def saved(self, step: int) -> float:
        """Bytes of rows that the step's cache serves in a batch, and the one before it does not."""
        rate = self.cache(step - 1).miss_rate - self.cache(step).miss_rate
        return rate * self.lookups * self.spec.embedding_dim * weight_bits(self.spec, self.kernel) / 8


def _larger_caches(plan: LoadedPlan) -> dict[str, CacheParams]:
    """Caches that fill the device memory that a plan leaves free, by path of the table; none where there is no cache.

    Args:
        plan: the plan.
    """
    space, topology = plan.space, plan.space.topology
    device = main_device(topology.compute_devices)
    tier = space.tiers.index(topology.tier_of(_DEVICE, device))
    free: Ints = space.capacity_bytes[:, tier] - plan.used_bytes[:, tier]
    tables = list(_cached_tables(plan))
    steps = _given_out(tables, free)
    return {table.spec.path: table.cache(step) for table, step in zip(tables, steps, strict=True) if step}


def _given_out(tables: list[_CachedTable], free: Ints) -> list[int]:
    """Number of steps that each table's cache grows by: the step that saves most by a byte comes first."""
    steps = [0] * len(tables)
    waiting: list[tuple[float, int, int]] = []

    def offer(index: int) -> None:
        table, step = tables[index], steps[index] + 1
        if step <= _STEPS:
            cost = int(_growth(table, step, len(free)).sum())
            gain = float(f"{table.saved(step) / max(1, cost):.6g}")  # so that equal gains take turns
            heapq.heappush(waiting, (-gain, step, index))

    for index in range(len(tables)):
        offer(index)
    while waiting:
        loss, _, index = heapq.heappop(waiting)
        growth = _growth(tables[index], steps[index] + 1, len(free))
        # A table for which there is no room, or no use, is not asked again.
        if loss < 0 and (growth <= free).all():
            free = free - growth
            steps[index] += 1
            offer(index)
    return steps


def _growth(table: _CachedTable, step: int, world_size: int) -> Ints:
    grown: Ints = table.device_bytes(step, world_size) - table.device_bytes(step - 1, world_size)
    return grown


def _cached_tables(plan: LoadedPlan) -> Iterator[_CachedTable]:
    """The tables whose kernel reads a part of the rows from the device and others from elsewhere."""
    options, ranks = plan.space.options, plan.ranks_of_tables
    for number, (spec, option) in enumerate(zip(options.all_tables, plan.proposal.tolist(), strict=True)):
        runs, kernel = options.shards_of(option), options.kernel_of(option)
        count = options.count[runs]
        requests = [options.requests[code][1] for code in np.repeat(options.request[runs], count)]
        if len(kernel.reads(requests[0])) < 2:
            continue
        rows = np.repeat(options.num_rows[runs], count).tolist()
        own = zip(ranks[number], rows, requests, strict=True)
        yield _CachedTable(spec, kernel, _lookups(plan.space, number, spec), tuple(own))


def _lookups(space: SearchSpace, number: int, spec: TableSpec) -> float:
    """Distinct rows that all ranks look up, from the table's statistics; else ids of all ranks."""
    if spec.cache.stats is not None:
        return spec.cache.stats.expected_lookups
    ids = space.options.ids_per_batch[space.options.distinct_table[number]]
    return float(ids) * space.topology.world_size
