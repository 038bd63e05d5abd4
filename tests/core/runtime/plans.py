"""Plans of any shape, and kernels that are loops: the engine is tested with no installed plugin loaded."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from attrs import evolve, field, frozen
from hypothesis import settings
from hypothesis import strategies as st
from torch import nn

from shardwright import (
    Block,
    Collection,
    ColumnRange,
    ComputeKernel,
    Dataflow,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingCollectionSharder,
    EmbeddingConfig,
    Exchange,
    Extension,
    FeatureBatch,
    KeyedJaggedTensor,
    Layout,
    Lookup,
    ModuleSharder,
    ParameterSharding,
    QCommsConfig,
    RoutingPlan,
    RowMap,
    RowsModulo,
    RowsRange,
    RowsSplit,
    ShardingEnv,
    hookimpl,
)
from shardwright.host import PluginHost
from shardwright.optim.fused import renaming
from shardwright.runtime.routed.plan import plan_routing
from shardwright.runtime.routed.tables import return_path_of
from shardwright.runtime.step.batches.inputs import BatchReader
from shardwright_plugins.dataflows import Replicate

RATE = 0.5
EXAMPLES = settings(max_examples=60, deadline=None)


class LoopLookup(Lookup):
    """Bag by bag; plain SGD in the backward pass."""

    def __init__(self, blocks, *, batch_major):
        self.blocks = blocks
        self._batch_major = batch_major and blocks[0].request.is_pooled
        self._rate = blocks[0].request.optimizer.learning_rate
        self._weights = [torch.zeros(spec.block.num_rows, spec.block.num_columns) for spec in blocks]
        self._block_of_slot = [index for index, spec in enumerate(blocks) for _ in range(spec.num_slots)]

    def _bags(self, bags):
        """Source, slot and number of each bag, its ids and their weights."""
        start = bag = 0
        for source, counts in enumerate(bags.counts):
            for slot, count in enumerate(counts):
                for number in range(count):
                    stop = start + (1 if bags.lengths is None else int(bags.lengths[bag]))
                    weights = torch.ones(stop - start) if bags.weights is None else bags.weights[start:stop]
                    yield source, slot, number, bags.ids[start:stop], weights
                    start, bag = stop, bag + 1

    def _dims(self):
        return [self.blocks[index].block.num_columns for index in self._block_of_slot]

    def _regions(self, flat, bags):
        """For each source and slot a view `[bags, D]` into the flat results."""
        dims, regions, start = self._dims(), [], 0
        for counts in bags.counts:
            sizes = [count * dim for count, dim in zip(counts, dims, strict=True)]
            own = flat[start : start + sum(sizes)]
            start += own.numel()
            if self._batch_major:
                regions.append(own.view(counts[0], sum(dims)).split(dims, 1))
            else:
                pieces = zip(own.split(sizes), counts, dims, strict=True)
                regions.append([piece.view(count, dim) for piece, count, dim in pieces])
        return regions

    def forward(self, bags, *, training):
        pairs = [pair for counts in bags.counts for pair in zip(counts, self._dims(), strict=True)]
        flat = torch.zeros(sum(count * dim for count, dim in pairs))
        regions = self._regions(flat, bags)
        for source, slot, number, ids, weights in self._bags(bags):
            rows = self._weights[self._block_of_slot[slot]][ids]
            regions[source][slot][number] = (rows * weights[:, None]).sum(0)
        return flat, bags if training else None

    def backward(self, saved, gradient):
        regions = self._regions(gradient, saved)
        for source, slot, number, ids, weights in self._bags(saved):
            change = weights[:, None] * regions[source][slot][number] * -self._rate
            self._weights[self._block_of_slot[slot]].index_add_(0, ids, change)
        return ()

    def weight(self, block):
        return self._weights[block]

    def set_learning_rate(self, learning_rate):
        self._rate = learning_rate


class Loop(ComputeKernel):
    name, aliases = "loop", ("looped",)

    def supports(self, request):
        return True if request.optimizer and request.optimizer.name == "sgd" else "it runs sgd only"

    def memory_bytes(self, request, num_rows):
        return {"device": 4 * num_rows * request.num_columns}

    def build(self, blocks, *, device):
        return LoopLookup(blocks, batch_major=self.batch_major)


class LoopBySample(Loop):
    """The other order of results."""

    name, aliases, batch_major = "loop_by_sample", (), True


class Descent(Extension):
    """Gradient descent as torch has it, for the loops' one optimizer."""

    name = "torch_optimizers:sgd"

    def load(self):
        return lambda: [(torch.optim.SGD, "sgd", renaming({"lr": "learning_rate"}), _descent)]


def _descent(spec, params):
    return torch.optim.SGD(params, lr=spec.learning_rate)


class Kernels:
    @hookimpl
    def shardwright_compute_kernels(self):
        return [Loop, LoopBySample]

    @hookimpl
    def shardwright_extensions(self):
        return [Descent]


def host_with_loops(**plugins: Any) -> PluginHost:
    """The plugin host with the kernels that are loops, and with plugins by name."""
    return PluginHost(entry_points=(), plugins={"loops": Kernels(), **plugins}, environment={})


@frozen
class RowsMirrored(RowMap):
    """A row map that is no slice: the last row comes first, parts are dealt round-robin."""

    name = "mirrored"
    num_rows: int
    parts: int

    @property
    def num_parts(self):
        return self.parts

    def part_of(self, ids):
        return (self.num_rows - 1 - ids) % self.parts

    def local_row_of(self, ids):
        return (self.num_rows - 1 - ids) // self.parts

    def rows_of(self, part):
        return np.arange(self.num_rows)[::-1][part :: self.parts].copy()


@frozen
class Cut:
    """A table, and how it is cut and placed: block `i` on `ranks[i % len(ranks)]`.

    Of the row parts `copied`, each of `num_copies` ranks has a copy instead.
    """

    rows: int
    dim: int
    features: tuple[str, ...]
    pooling: str = "SUM"
    row_map: RowMap | None = None
    edges: tuple[int, ...] = ()
    ranks: tuple[int, ...] = (0,)
    kernel: str = "loop"
    dataflow: Dataflow = field(factory=Exchange)
    codecs: QCommsConfig | None = None
    copied: tuple[int, ...] = ()
    num_copies: int = 0

    def layout(self) -> Layout:
        """The blocks; of a replicated table, a copy on each of `ranks`."""
        edges = [0, *sorted({edge for edge in self.edges if 0 < edge < self.dim}), self.dim]
        row_map = self.row_map or RowsRange(self.rows, parts=1)
        blocks = [
            Block(part, ColumnRange(start, stop))
            for part in row_map
            if part.index not in self.copied
            for start, stop in pairwise(edges)
        ]
        if self.dataflow.is_replicated:
            blocks *= len(self.ranks)
        ranks = [self.ranks[index % len(self.ranks)] for index in range(len(blocks))]
        for rank in range(self.num_copies):
            for part in self.copied:
                blocks.append(Block(row_map[part], ColumnRange(0, self.dim), dataflow=Replicate()))
                ranks.append(rank)
        return Layout(blocks, self.dataflow).placed(ranks)


def paths_here(*, is_pooled):
    """The return paths that dataflows name, whatever the ranks are."""

    def path_of(sharding, dataflow):
        path = return_path_of(dataflow, is_pooled=is_pooled)
        return path, not path.keeps_empty_bags

    return path_of


def _seeded(module: Any) -> Any:
    """A module with the same weights each time: ranks are threads, and draw from torch's own generator together."""
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        if not parameter.is_meta:
            nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return module


@frozen
class Cuts:
    """Tables of one collection over some ranks."""

    tables: tuple[Cut, ...] = field(converter=tuple)
    world_size: int
    is_weighted: bool = False
    has_columns: bool = False
    """Ids carry two columns that follow from their weights."""

    @property
    def features(self) -> list[str]:
        return sorted({feature for table in self.tables for feature in table.features}, reverse=True)

    @property
    def is_pooled(self) -> bool:
        return self.tables[0].pooling != "NONE"

    def module(self, device: str = "cpu") -> EmbeddingBagCollection | EmbeddingCollection:
        common = [
            {
                "name": f"t{index}",
                "num_embeddings": table.rows,
                "embedding_dim": table.dim,
                "feature_names": list(table.features),
            }
            for index, table in enumerate(self.tables)
        ]
        if not self.is_pooled:
            return _seeded(
                EmbeddingCollection([EmbeddingConfig(**config) for config in common], device=device)
            )
        bags = [
            EmbeddingBagConfig(pooling=table.pooling, **config)
            for table, config in zip(self.tables, common, strict=True)
        ]
        return _seeded(EmbeddingBagCollection(bags, is_weighted=self.is_weighted, device=device))

    def shardings(self) -> dict[str, ParameterSharding]:
        return {
            f"t{index}": ParameterSharding("cut", table.kernel, table.layout(), qcomms_config=table.codecs)
            for index, table in enumerate(self.tables)
        }

    @property
    def sharder(self) -> ModuleSharder:
        return SHARDER if self.is_pooled else SEQUENCE_SHARDER

    def collection(self) -> Collection:
        return Collection.of(self.sharder.tables(self.module("meta")))

    def plan(self, rank: int = 0) -> RoutingPlan:
        """The routing of all blocks but those that are copied, as a rank has it."""
        routed = {
            name: evolve(sharding, layout=sharding.layout.served_by([sharding.layout.dataflow]))
            for name, sharding in self.shardings().items()
        }
        return plan_routing(
            self.collection(),
            range(len(self.tables)),
            routed,
            rank=rank,
            world_size=self.world_size,
            device_type="cpu",
            path_of=paths_here(is_pooled=self.is_pooled),
        )

    @property
    def columns(self) -> dict[str, torch.dtype]:
        weights = {"weights": torch.float32} if self.is_weighted else {}
        return {**weights, "count": torch.int64, "time": torch.float32} if self.has_columns else weights

    def read(self, batch: KeyedJaggedTensor) -> FeatureBatch:
        return BatchReader(self.collection(), columns=self.columns).read(batch)

    def shard(self, env: ShardingEnv, module: Any) -> Any:
        return self.sharder.shard(module, self.shardings(), env, "cpu")

    def batch(self, batch_size: int, seed: int = 0, *, max_length: int = 3) -> KeyedJaggedTensor:
        generator = torch.Generator().manual_seed(seed)
        values, lengths = [], []
        for feature in self.features:
            rows = min(table.rows for table in self.tables if feature in table.features)
            lengths.append(torch.randint(0, max_length + 1, (batch_size,), generator=generator))
            values.append(torch.randint(0, rows, (int(lengths[-1].sum()),), generator=generator))
        ids = torch.cat(values)
        weights = torch.rand(ids.numel(), generator=generator)
        every = {"weights": weights, "count": (weights * 2**24).long(), "time": 1 - weights}
        return KeyedJaggedTensor(
            keys=self.features,
            values=ids,
            lengths=torch.cat(lengths).int(),
            columns={name: every[name] for name in self.columns},
        )


FUSED = {"optimizer": "sgd", "learning_rate": RATE}
SHARDER = EmbeddingBagCollectionSharder(FUSED)
SEQUENCE_SHARDER = EmbeddingCollectionSharder(FUSED)


@st.composite
def cut_tables(draw: st.DrawFn, world_size: int, *, is_pooled: bool = True, with_copies: bool = False) -> Cut:
    rows, dim = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    kind = draw(st.sampled_from([None, RowsRange, RowsModulo, RowsMirrored, RowsSplit]))
    if kind is RowsSplit:
        inner = sorted(draw(st.lists(st.integers(0, rows), max_size=3)))
        row_map: RowMap | None = RowsSplit((0, *inner, rows))
    else:
        row_map = None if kind is None else kind(rows, parts=draw(st.integers(1, 4)))
    most = row_map.num_parts - 1 if row_map and with_copies else 0
    copied = draw(st.sets(st.integers(0, most), max_size=most))
    return Cut(
        rows,
        dim,
        tuple(draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True))),
        draw(st.sampled_from(["SUM", "MEAN"])) if is_pooled else "NONE",
        row_map,
        tuple(draw(st.lists(st.integers(1, 5), max_size=2))),
        tuple(draw(st.lists(st.integers(0, world_size - 1), min_size=1, max_size=4))),
        draw(st.sampled_from(["loop", "loop_by_sample"])),
        copied=tuple(copied),
        num_copies=world_size,
    )


@st.composite
def cuts(
    draw: st.DrawFn,
    world_size: int | None = None,
    *,
    is_pooled: bool | None = True,
    with_copies: bool = False,
) -> Cuts:
    """Collections whose tables are cut by rows, columns or both, with empty parts, and dealt anywhere.

    With `is_pooled=None` of bags or of sequences; with `with_copies` every rank may have a copy of some row parts.
    """
    world_size = world_size or draw(st.integers(1, 3))
    pooled = draw(st.booleans()) if is_pooled is None else is_pooled
    drawn = cut_tables(world_size, is_pooled=pooled, with_copies=with_copies)
    tables = draw(st.lists(drawn, min_size=1, max_size=3))
    return Cuts(tables, world_size, pooled and draw(st.booleans()))


def output_of(case: Cuts, result: Any) -> torch.Tensor:
    """A module's result as one tensor: pooled columns, or all sequences' rows, flat."""
    if case.is_pooled:
        return result.values()
    return torch.cat([result[name].values().reshape(-1) for name in sorted(result.keys())])


def gradient_like(output: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.rand(output.shape, generator=torch.Generator().manual_seed(seed)) - 0.3


def train_unsharded(case: Cuts, batches: Sequence[Sequence[KeyedJaggedTensor]]) -> dict[str, torch.Tensor]:
    """Weights of the unsharded module after a step of SGD for each of `batches[step][rank]`."""
    module = case.module()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    for step, by_rank in enumerate(batches):
        optimizer.zero_grad()
        for rank, batch in enumerate(by_rank):
            values = output_of(case, module(batch))
            ((values * gradient_like(values, 10 * step + rank)).sum() / case.world_size).backward()
        optimizer.step()
    return module.state_dict()


def train_step(case: Cuts, sharded: Any, batch: KeyedJaggedTensor, step: int, rank: int) -> torch.Tensor:
    """One rank's part of such a step; returns the output."""
    values = output_of(case, sharded(batch))
    values.backward(gradient_like(values, 10 * step + rank))
    return values.detach()
