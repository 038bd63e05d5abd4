"""Little plugins of this process, so that planning is tested with no installed plugin loaded."""

from __future__ import annotations

import types
from collections.abc import Iterator

import numpy as np
import pytest

from shardwright import (
    Block,
    ComputeKernel,
    Estimator,
    Layout,
    Partitioner,
    Proposer,
    Proven,
    RowsModulo,
    RowsRange,
    ShardingType,
    hookimpl,
)
from shardwright.host import PluginHost, use_host
from shardwright_plugins.reports import shardwright_extensions


class Whole(ShardingType):
    name, abbreviation, aliases = "whole", "WH", ("entire",)
    offered = "always"

    def layouts(self, table, topology, constraints):
        yield Layout([Block(table.all_rows, table.all_columns)])


class Slices(ShardingType):
    """Rows over all ranks; two variants, the second with data of its own."""

    name, abbreviation = "slices", "SL"
    offered = "always"

    def layouts(self, table, topology, constraints):
        for row_map in (RowsRange, RowsModulo):
            rows = row_map(table.num_embeddings, parts=topology.world_size)
            yield Layout(
                [Block(part, table.all_columns, rank=rank) for rank, part in enumerate(rows)],
                variant=row_map.name,
                extras={"made_by": "slices", "nested": {"numbers": [1, 2.5, None]}},
            )


class OnlyPairs(ShardingType):
    name, abbreviation = "only_pairs", "OP"
    offered = "always"

    def supports(self, table, topology):
        return True if topology.world_size == 2 else f"needs 2 ranks, there are {topology.world_size}"

    def layouts(self, table, topology, constraints):
        half = table.embedding_dim // 2
        yield Layout(
            [
                Block(table.all_rows, table.columns(0, half)),
                Block(table.all_rows, table.columns(half, table.embedding_dim)),
            ]
        )


class Plain(ComputeKernel):
    """Anything but Adam."""

    name, aliases, preference = "plain", ("simple",), 1

    def supports(self, request):
        name = request.optimizer.name if request.optimizer else "none"
        return True if name != "adam" else "plain knows no adam"

    def memory_bytes(self, request, num_rows):
        return {"device": num_rows * self.row_bytes(request)}

    def build(self, blocks, *, device):
        raise NotImplementedError


class Thorough(Plain):
    """Any optimizer, at twice the memory and half the speed."""

    name, aliases, preference = "thorough", (), 0

    def supports(self, request):
        return True

    def memory_bytes(self, request, num_rows):
        return {"device": 2 * super().memory_bytes(request, num_rows)["device"]}

    def bandwidth_fraction(self, request):
        return 0.5


class Visible(Plain):
    name, aliases, preference, fuses_optimizer = "visible", (), 5, False


class Cells(Estimator):
    """A millisecond for each 1000 cells, twice that in the backward pass."""

    name, preference = "cells", 1

    def estimate(self, options, topology):
        fraction = options.by_request(lambda kernel, request: kernel.bandwidth_fraction(request))
        cells = options.ids_per_batch[options.shard_table] * options.num_rows * options.num_columns / 1000
        forward = cells / fraction
        return {"forward": forward, "backward": 2 * forward}

    def provenance(self, options):
        return {"cells_per_ms": 1000}


class Weights(Estimator):
    name, measures, preference = "weights", "storage", 1

    def estimate(self, options, topology):
        asked = [
            (*options.requests[code], rows)
            for code, rows in zip(options.request, options.num_rows, strict=True)
        ]
        memory = [
            options.compute_kernels[kernel].memory_bytes(request, int(rows))
            for kernel, request, rows in asked
        ]
        return {topology.tier_of("device"): np.array([used["device"] for used in memory])}


class EachAlone(Proposer):
    """The first option of every table, then each table's others in turn."""

    name, preference = "each_alone", 1

    def proposals(self, space):
        proposal = space.options.first_option[:-1].copy()
        yield proposal
        for table in range(len(proposal)):
            for option in space.options.of_table(table):
                proposal[table] = option
                yield proposal.copy()


class WithBound(EachAlone):
    """The same, and a bound: all tables' cheapest options, shared evenly by the ranks; or so many times that."""

    name, preference = "with_bound", 0

    def __init__(self, times=1.0):
        self.times = times

    def proposals(self, space, watch):
        least = np.minimum.reduceat(space.total_cost_ms, space.options.first_option[:-1])
        bound_ms = float(least @ space.options.multiplicity) / len(space.capacity_bytes)
        yield Proven(self.times * bound_ms, {"z_ms": self.times * bound_ms, "multipliers": {}})
        yield from super().proposals(space)


class FirstFit(Partitioner):
    name, preference = "first_fit", 1

    def place(self, shards):
        misfit = shards.fixed_misfit()
        if misfit is not None:
            return misfit
        ranks = shards.rank.copy()
        used = shards.fixed_bytes.copy()
        fixed = shards.is_fixed
        np.add.at(used, ranks[fixed], shards.memory_bytes[fixed])
        for shard in np.flatnonzero(~fixed):
            room = (used + shards.memory_bytes[shard] <= shards.capacity_bytes).all(axis=1)
            if not room.any():
                return shards.misfit(int(shard), used)
            ranks[shard] = np.argmax(room)
            used[ranks[shard]] += shards.memory_bytes[shard]
        return ranks


OFFERED = {
    "sharding_types": [Whole, Slices, OnlyPairs],
    "compute_kernels": [Plain, Thorough, Visible],
    "estimators": [Cells, Weights],
    "proposers": [EachAlone],
    "partitioners": [FirstFit],
    "extensions": [extension for extension in shardwright_extensions() if extension.name == "method:no_plan"],
}


def make_host(**changes: list[object]) -> PluginHost:
    """A host with the little plugins, and no installed one."""
    module = types.ModuleType("little_plugins")
    for kind, items in {**OFFERED, **changes}.items():
        setattr(module, f"shardwright_{kind}", _hook(kind, items))
    return PluginHost(entry_points=(), plugins={"little": module}, environment={})


def _hook(kind: str, items: list[object]):
    def offer():
        return items

    offer.__name__ = f"shardwright_{kind}"
    return hookimpl(offer)


@pytest.fixture(autouse=True)
def little_plugins() -> Iterator[PluginHost]:
    """The little plugins are the host's in every test here."""
    with use_host(make_host()) as host:
        yield host


@pytest.fixture
def host_with():
    """`with host_with(proposers=[...]):` replaces what is offered of a kind."""
    return lambda **changes: use_host(make_host(**changes))
