"""Plugins that are deliberately wrong, one mistake each, made from right ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from tests.plugins.conformance.mistakes.wrong_extensions import RightExtension

import shardwright as sw
from shardwright.host import host


class Delegate:
    """Everything as another object has it, but for what a subclass says."""

    def __init__(self, right: Any) -> None:
        self._right = right
        if isinstance(right, sw.Lookup):
            self.blocks = right.blocks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._right, name)


# --- sharding types -------------------------------------------------------------------------------------------------


@attrs.frozen
class OffByOne(sw.RowMap):
    """Neighbouring rows, where the last row of a part is sent to the next part."""

    name = "off_by_one"
    num_rows: int
    num_parts: int

    @property
    def block_rows(self) -> int:
        return max(1, -(-self.num_rows // self.num_parts))

    def part_of(self, ids: Any) -> Any:
        return (ids + 1) // self.block_rows % self.num_parts

    def local_row_of(self, ids: Any) -> Any:
        return ids % self.block_rows

    def rows_of(self, part: int) -> slice:
        start = min(part * self.block_rows, self.num_rows)
        return slice(start, min(start + self.block_rows, self.num_rows))


class OffByOneRows(sw.ShardingType):
    """A part of the rows on each rank."""

    name, abbreviation, row_maps = "off_by_one_rows", "OBO", (OffByOne,)
    made_by: Any = OffByOne

    def layouts(self, table: Any, topology: Any, constraints: Any) -> Iterator[sw.Layout]:
        rows = self.made_by(table.num_embeddings, topology.world_size)
        yield sw.Layout(sw.Block(part, table.all_columns, rank) for rank, part in enumerate(rows))


class DoubleCounted(sw.ShardingType):
    """The first part of the rows is on two ranks."""

    name, abbreviation = "double_counted", "DBL"

    def layouts(self, table: Any, topology: Any, constraints: Any) -> Iterator[sw.Layout]:
        rows = sw.RowsModulo(table.num_embeddings, parts=topology.world_size)
        blocks = [sw.Block(part, table.all_columns, rank) for rank, part in enumerate(rows)]
        yield sw.Layout([*blocks, sw.Block(rows[0], table.all_columns, topology.world_size - 1)])


class LastColumnLost(sw.ShardingType):
    name, abbreviation = "last_column_lost", "LCL"

    def layouts(self, table: Any, topology: Any, constraints: Any) -> Iterator[sw.Layout]:
        yield sw.Layout([sw.Block(table.all_rows, table.columns(0, max(1, table.embedding_dim - 1)))])


class AlternatingRanks(sw.ShardingType):
    """Another layout each time it is asked."""

    name, abbreviation = "alternating", "ALT"

    def __init__(self) -> None:
        self._calls = itertools.count()

    def layouts(self, table: Any, topology: Any, constraints: Any) -> Iterator[sw.Layout]:
        rank = next(self._calls) % topology.world_size
        yield sw.Layout([sw.Block(table.all_rows, table.all_columns, rank)])


class UnlistedMap(OffByOneRows):
    """A right row map that no plan can be read back with."""

    name, abbreviation, row_maps, made_by = "unlisted_map", "ULM", (), sw.RowsModulo


@attrs.frozen
class ListedRows(sw.RowMap):
    """Rows dealt to the parts, which are listed to be counted."""

    name = "listed_rows"
    num_rows: int
    num_parts: int

    def part_of(self, ids: Any) -> Any:
        return ids % self.num_parts

    def local_row_of(self, ids: Any) -> Any:
        return ids // self.num_parts

    def rows_of(self, part: int) -> Any:
        return np.arange(part, self.num_rows, self.num_parts)


@attrs.frozen
class CountedRows(ListedRows):
    """Counted by a formula, but listed to learn whether they are neighbours."""

    name = "counted_rows"

    def num_rows_of(self, part: int) -> int:
        return len(range(part, self.num_rows, self.num_parts))


class ListsRows(OffByOneRows):
    name, abbreviation, row_maps, made_by = "lists_rows", "LST", (ListedRows,), ListedRows


class ListsNeighbours(OffByOneRows):
    name, abbreviation, row_maps, made_by = "lists_neighbours", "LSN", (CountedRows,), CountedRows


# --- compute kernels ------------------------------------------------------------------------------------------------


class RightKernel(sw.ComputeKernel):
    """The plain-torch kernel."""

    name = "right"

    def __init__(self) -> None:
        self._right = host().compute_kernels.create("fused_torch")

    def supports(self, request: sw.KernelRequest) -> Any:
        return self._right.supports(request)

    def memory_bytes(self, request: sw.KernelRequest, num_rows: int) -> Mapping[str, int]:
        return self._right.memory_bytes(request, num_rows)

    def group_key(self, request: sw.KernelRequest) -> Any:
        return self._right.group_key(request)

    def needs_whole_rows(self, request: sw.KernelRequest) -> bool:
        return self._right.needs_whole_rows(request)

    def build(self, blocks: Sequence[sw.BlockSpec], *, device: Any) -> sw.Lookup:
        return self.changed(self._right.build(blocks, device=device))

    def changed(self, lookup: sw.Lookup) -> Any:
        return lookup


class WrongMemory(RightKernel):
    """Forgets optimizer state."""

    name = "wrong_memory"

    def memory_bytes(self, request: sw.KernelRequest, num_rows: int) -> Mapping[str, int]:
        return {"device": num_rows * self.row_bytes(request)}


class OneTimeForAll(RightKernel):
    """Tells one time for all blocks together."""

    name = "one_time_for_all"

    def times_ms(self, request: sw.KernelRequest, work: Any) -> Any:
        lookup_ms = work.ids.sum(keepdims=True) * 1e-5
        return lookup_ms, lookup_ms


class AsksForDoubles(RightKernel):
    """Asks for a column of ids of a type that does not travel."""

    name = "asks_for_doubles"

    def columns(self, request: sw.KernelRequest) -> Mapping[str, str]:
        return {"time": "float64"}


class _WeighsLookupsByAColumn(Delegate):
    def forward(self, bags: sw.Bags, *, training: bool) -> Any:
        return self._right.forward(attrs.evolve(bags, weights=bags.columns["time"]), training=training)


class WeighsByAColumn(RightKernel):
    """Takes a column of ids for their weights, which it loses."""

    name = "weighs_by_a_column"

    def columns(self, request: sw.KernelRequest) -> Mapping[str, str]:
        return {"time": "float32"}

    def changed(self, lookup: sw.Lookup) -> Any:
        return _WeighsLookupsByAColumn(lookup)


class NoCache(RightKernel):
    """Declares a cache of rows, whose parameters it drops."""

    name, caches_rows = "no_cache", True


class _WithoutWeights(Delegate):
    def forward(self, bags: sw.Bags, *, training: bool) -> Any:
        return self._right.forward(attrs.evolve(bags, weights=None), training=training)


class LostIdWeights(RightKernel):
    """Looks up as if ids had no weights."""

    name = "lost_id_weights"

    def changed(self, lookup: sw.Lookup) -> Any:
        return _WithoutWeights(lookup)


class _UpdatesWithoutWeights(Delegate):
    def forward(self, bags: sw.Bags, *, training: bool) -> Any:
        sums, _ = self._right.forward(bags, training=training)
        return sums, self._right.prepare(attrs.evolve(bags, weights=None)) if training else None


class UpdateWithoutIdWeights(RightKernel):
    """Looks up with the weights of ids, and goes back without."""

    name = "update_without_id_weights"

    def changed(self, lookup: sw.Lookup) -> Any:
        return _UpdatesWithoutWeights(lookup)


class _CopiesWeights(Delegate):
    def weight(self, block: int) -> torch.Tensor:
        return self._right.weight(block).clone()


class LostCheckpoint(RightKernel):
    """What is loaded into its weights is lost: it gives a copy."""

    name = "lost_checkpoint"

    def changed(self, lookup: sw.Lookup) -> Any:
        return _CopiesWeights(lookup)


class _Means(Delegate):
    def forward(self, bags: sw.Bags, *, training: bool) -> Any:
        if bags.lengths is None:
            return self._right.forward(bags, training=training)
        weights = torch.ones(len(bags.ids)) if bags.weights is None else bags.weights
        lengths = bags.per_id(bags.lengths.float())
        return self._right.forward(attrs.evolve(bags, weights=weights / lengths), training=training)


class _SumsAlone(Delegate):
    def forward(self, bags: sw.Bags, *, training: bool) -> Any:
        return self._right.forward(bags, training=training)[0]


class SumsAlone(RightKernel):
    """Gives sums without what the backward pass needs."""

    name = "sums_alone"

    def changed(self, lookup: sw.Lookup) -> Any:
        return _SumsAlone(lookup)


class DividesItself(RightKernel):
    """Gives means, which the engine divides once more."""

    name = "divides_itself"

    def changed(self, lookup: sw.Lookup) -> Any:
        return _Means(lookup)


class PromisesTooMuch(RightKernel):
    """Says it supports BF16, and cannot build it."""

    name = "promises_too_much"

    def build(self, blocks: Sequence[sw.BlockSpec], *, device: Any) -> sw.Lookup:
        if blocks[0].request.data_type == "BF16":
            raise TypeError("BF16")
        return super().build(blocks, device=device)


class _RateOfTheLastForward(Delegate):
    _waiting: float | None = None

    def set_learning_rate(self, learning_rate: float) -> None:
        self._waiting = learning_rate

    def forward(self, bags: sw.Bags, *, training: bool) -> Any:
        if self._waiting is not None:
            self._right.set_learning_rate(self._waiting)
        return self._right.forward(bags, training=training)


class RateOfTheLastForward(RightKernel):
    """Goes back through a batch at the learning rate of whichever forward pass was the last."""

    name = "rate_of_the_last_forward"

    def changed(self, lookup: sw.Lookup) -> Any:
        return _RateOfTheLastForward(lookup)


class _NoUpdate(Delegate):
    def backward(self, saved: Any, gradient: torch.Tensor) -> Any:
        return ()


class HalvesNeverTrained(RightKernel):
    """Takes nothing but float16 and Adagrad, and forgets to update."""

    name = "halves_never_trained"

    def supports(self, request: sw.KernelRequest) -> Any:
        if request.data_type.name != "FP16" or not request.optimizer or request.optimizer.name != "adagrad":
            return "float16 and Adagrad only"
        return super().supports(request)

    def changed(self, lookup: sw.Lookup) -> Any:
        return _NoUpdate(lookup)


# --- estimators -----------------------------------------------------------------------------------------------------


class RightEstimator(sw.Estimator):
    """Bytes of rows at a gigabyte a second."""

    name = "right"

    def estimate(self, options: Any, topology: Any) -> Mapping[str, Any]:
        rows = options.ids_per_batch[options.shard_table] * options.row_fraction + options.num_rows
        return {"lookup": self.changed(options, rows * options.num_columns * 4e-6)}

    def changed(self, options: Any, column: Any) -> Any:
        return column


class NotFinite(RightEstimator):
    name = "not_finite"

    def changed(self, options: Any, column: Any) -> Any:
        with np.errstate(divide="ignore", invalid="ignore"):
            return column / np.where(options.ids_per_batch[options.shard_table] > 0, 1.0, 0.0)


class FallsWithBytes(RightEstimator):
    name = "falls_with_bytes"

    def changed(self, options: Any, column: Any) -> Any:
        return 1 / (1 + column)


class NotColumnar(RightEstimator):
    """A shard's time depends on the other tables."""

    name = "not_columnar"

    def changed(self, options: Any, column: Any) -> Any:
        return column * len(options.tables)


# --- proposers ------------------------------------------------------------------------------------------------------


class RightProposer(sw.Proposer):
    """The first option of each table, then the last."""

    name = "right"

    def proposals(self, space: Any) -> Any:
        first = space.options.first_option
        yield first[:-1][space.options.distinct_table]
        yield (first[1:] - 1)[space.options.distinct_table]


class Shuffled(RightProposer):
    name = "shuffled"
    _random = np.random.default_rng()

    def proposals(self, space: Any) -> Any:
        first = space.options.first_option
        for _ in range(3):
            yield self._random.integers(first[:-1], first[1:])[space.options.distinct_table]


class Endless(RightProposer):
    name = "endless"

    def proposals(self, space: Any) -> Any:
        while True:
            yield from super().proposals(space)


class AnotherTables(RightProposer):
    """The options of the next table."""

    name = "another_tables"

    def proposals(self, space: Any) -> Any:
        yield space.options.first_option[1:][space.options.distinct_table]


# --- partitioners ---------------------------------------------------------------------------------------------------


class RightPartitioner(sw.Partitioner):
    name = "right"

    def place(self, shards: sw.ProposedShards) -> Any:
        return self.changed(shards, host().partitioners.create("greedy_perf").place(shards))

    def changed(self, shards: sw.ProposedShards, placed: Any) -> Any:
        return placed


class OverCapacity(RightPartitioner):
    """What does not fit goes to the emptiest rank all the same."""

    name = "over_capacity"

    def changed(self, shards: sw.ProposedShards, placed: Any) -> Any:
        if isinstance(placed, np.ndarray):
            return placed
        room = (shards.capacity_bytes - shards.fixed_bytes).min(axis=1)
        return np.where(shards.is_fixed, shards.rank, int(room.argmax()))


class RandomOrder(RightPartitioner):
    name = "random_order"
    _random = np.random.default_rng()

    def changed(self, shards: sw.ProposedShards, placed: Any) -> Any:
        if not isinstance(placed, np.ndarray) or not len(placed):
            return placed
        moved = self._random.permutation(shards.world_size)[placed]
        return np.where(shards.is_fixed | (shards.gang >= 0), placed, moved)


class SaysNothing(RightPartitioner):
    """A misfit without its numbers."""

    name = "says_nothing"

    def changed(self, shards: sw.ProposedShards, placed: Any) -> Any:
        return (
            placed if isinstance(placed, np.ndarray) else attrs.evolve(placed, needed_bytes=0, free_bytes=0)
        )


# --- comm backends --------------------------------------------------------------------------------------------------


class RightBackend(sw.CommBackend):
    name = "right"
    devices = ("cpu",)

    def connect(self, process_group: Any) -> sw.Communicator:
        return self.changed(host().comm_backends.create("gloo").connect(process_group))

    def changed(self, communicator: sw.Communicator) -> Any:
        return communicator


class _EvenSplits(Delegate):
    """Splits as if all were equal, where they add up."""

    def all_to_all(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, *, label: str = ""
    ) -> Any:
        work = self._right.all_to_all(output, input, output_splits, input_splits, label=label)
        work.wait()
        output.copy_(output.flip(0))
        return work


class MixesUpRanks(RightBackend):
    name = "mixes_up_ranks"

    def changed(self, communicator: sw.Communicator) -> Any:
        return _EvenSplits(communicator)


class _Forgiving(Delegate):
    def all_to_all(self, *arguments: Any, label: str = "") -> Any:
        try:
            return _Swallows(self._right.all_to_all(*arguments, label=label))
        except RuntimeError:
            return _Swallows(None)


class _Swallows(Delegate):
    def wait(self) -> None:
        try:
            self._right.wait()
        except (RuntimeError, AttributeError):  # the second: nothing was started
            return


class SwallowsErrors(RightBackend):
    """A rank that does not come goes unnoticed."""

    name = "swallows_errors"

    def changed(self, communicator: sw.Communicator) -> Any:
        return _Forgiving(communicator)


# --- codecs ---------------------------------------------------------------------------------------------------------


class RightCodec(sw.Codec):
    """bfloat16."""

    name = "right"
    is_elementwise = True

    def __init__(self) -> None:
        self._right = host().codecs.create("bf16")

    def row_bytes(self, num_columns: int) -> int:
        return self._right.row_bytes(num_columns)

    def encode(self, values: torch.Tensor, encoded: torch.Tensor) -> None:
        self._right.encode(values, encoded)

    def decode(self, encoded: torch.Tensor, values: torch.Tensor) -> None:
        self._right.decode(encoded, values)

    def error_bound(self, values: torch.Tensor) -> torch.Tensor:
        return self._right.error_bound(values)


class BoundTooSmall(RightCodec):
    name = "bound_too_small"

    def error_bound(self, values: torch.Tensor) -> torch.Tensor:
        return super().error_bound(values) / 1000


class ChangesInput(RightCodec):
    """Scales what it is given in place."""

    name = "changes_input"

    def encode(self, values: torch.Tensor, encoded: torch.Tensor) -> None:
        super().encode(values, encoded)
        values.mul_(2)


class DrawsLots(RightCodec):
    """Rounds up or down by chance."""

    name = "draws_lots"

    def encode(self, values: torch.Tensor, encoded: torch.Tensor) -> None:
        super().encode(values * (1 + (torch.rand_like(values) - 0.5) * 1e-3), encoded)

    def error_bound(self, values: torch.Tensor) -> torch.Tensor:
        return super().error_bound(values) * 10 + values.abs() * 1e-2


# --- extensions -----------------------------------------------------------------------------------------------------


class ImportsTorch(RightExtension):
    """Stands in a module that imports torch, as this one does."""

    name = "command:imports_torch"
