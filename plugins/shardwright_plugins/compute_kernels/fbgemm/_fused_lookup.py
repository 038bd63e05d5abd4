"""Lookup of the ``fused`` kernel, over FBGEMM's ``SplitTableBatchedEmbeddingBagsCodegen``.

Legend: S slots, W sources, B_w their batch sizes, N ids.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from attrs import frozen
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from shardwright.contracts.lookup import Bags, BlockSpec, Lookup
from shardwright.planning.arrays import Ints
from shardwright.planning.tables.data_types import DataType
from shardwright.runtime.step.segments import repeated, spread, sums
from shardwright_plugins.compute_kernels._optimizers import ROW_WISE
from shardwright_plugins.compute_kernels._threads import in_threads
from shardwright_plugins.compute_kernels.fbgemm._bags import Cells, offsets_of, offsets_of_ids, slot_major

_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "row_wise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
}
_LINE_BYTES = 64
"""A cache line of x86-64 and of most ARM."""
_MOST_ROWS = 1 << 31
"""FBGEMM's backward pass on the CPU sorts row numbers of a table as int32 (``csr2csc``)."""
_PRECISIONS = {DataType.FP32: SparseType.FP32, DataType.FP16: SparseType.FP16, DataType.BF16: SparseType.BF16}
# The torch optimizers' names for FBGEMM's state tensors, in FBGEMM's order.
_STATE_NAMES = {
    "sgd": (),
    "adagrad": ("sum",),
    "row_wise_adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
}


@frozen(eq=False, slots=False)
class _Part:
    """A table-batched embedding of some neighbouring blocks, which one thread looks up.

    Args:
        tables: the embedding.
        slots: its slots, among all.
    """

    tables: SplitTableBatchedEmbeddingBagsCodegen
    slots: slice

    @cached_property
    def without_gradient(self) -> Tensor:
        """Zeros for FBGEMM, which else computes gradients of ids' weights, as if they were trained: ``[features]``."""
        num_features = self.tables.D_offsets.numel() - 1
        return torch.zeros(num_features, dtype=torch.int32, device=self.tables.current_device)

    def look_up(self, ids: Tensor, offsets: Tensor, weights: Tensor | None, *, training: bool) -> Tensor:
        """FBGEMM's result for these bags, with its graph in training."""
        # FBGEMM's operators for the CPU exist under autograd's dispatch keys only, which inference mode leaves out.
        with torch.inference_mode(False), torch.set_grad_enabled(training):
            untrained = None if weights is None else self.without_gradient
            result: Tensor = self.tables(
                ids, offsets, per_sample_weights=weights, feature_requires_grad=untrained
            )
        return result


_Asked: TypeAlias = "tuple[_Part, Tensor, Tensor, Tensor | None]"
"""A part, and the ids, offsets and weights that it is to look up."""


class _Saved:
    """The state of a forward pass that backward passes need.

    FBGEMM's graph serves one backward pass, which changes the weights. For a further one the lookup is made again.

    Args:
        results: FBGEMM's results, of each part.
        asked: bags of each part.
        cells: rows of each source and slot, or elements of each source and run, if FBGEMM's order may differ from that
            in which they came.
        width: elements that a cell counts as one.
    """

    def __init__(
        self, results: list[Tensor], asked: list[_Asked], cells: Cells | None = None, width: int = 1
    ) -> None:
        self._results: list[Tensor] | None = results
        self._asked, self.cells, self.width = asked, cells, width

    def forget(self) -> None:
        """Let the lookup be made again for the backward pass."""
        self._results = None

    def take(self) -> list[Tensor]:
        """The results, with graphs that have not been gone through."""
        results, self._results = self._results, None
        return _looked_up(self._asked, training=True) if results is None else results


class FusedLookup(Lookup):
    """One table-batched embedding over all blocks of the group; on the CPU one for each thread that torch may use.

    FBGEMM's CPU build runs an embedding on one thread, so that blocks are dealt, about equally many columns to each.
    """

    def __init__(
        self,
        blocks: Sequence[BlockSpec],
        *,
        device: torch.device,
        tables: SplitTableBatchedEmbeddingBagsCodegen | None = None,
    ) -> None:
        self.blocks = blocks
        optimizer = blocks[0].request.optimizer
        assert optimizer is not None  # the kernel's supports()
        self._optimizer = optimizer
        self.states_per_row = frozenset(_STATE_NAMES[optimizer.name] if optimizer.name in ROW_WISE else ())
        self._num_slots = sum(spec.num_slots for spec in blocks)
        self._parts = _dealt(blocks, device) if tables is None else [_Part(tables, slice(0, self._num_slots))]
        runs = [run for part in self._parts for run in _runs_of(part)]
        self._runs, self._first_rows = [run for run, _ in runs], np.concatenate([rows for _, rows in runs])
        self._weights = [own for part in self._parts for own in part.tables.split_embedding_weights()]
        self._num_steps = torch.zeros((), dtype=torch.float32, device="cpu")

    def forward(self, bags: Bags, *, training: bool) -> tuple[Tensor, Any]:
        if bags.lengths is None:
            return self._rows_of_ids(bags, training=training)
        if bags.is_ragged:
            return self._sums_as_they_came(bags, bags.lengths, training=training)
        ids, lengths, weights = slot_major(bags, bags.lengths)
        asked = self._asked(ids, offsets_of(lengths), weights)
        sums = _looked_up(asked, training=training)
        return _joined(sums, 1), _Saved(sums, asked) if training else None

    def _rows_of_ids(self, bags: Bags, *, training: bool) -> tuple[Tensor, Any]:
        """A row for each id, in the order the ids came."""
        cells = Cells(bags.table)
        offsets = offsets_of_ids(bags.table.sum(0), bags.ids.device)
        asked = self._asked(cells.slot_major(bags.ids), offsets, None)
        rows = _looked_up(asked, training=training)
        saved = _Saved(rows, asked, cells, rows[0].shape[1]) if training else None
        return cells.as_they_came(_joined(rows, 0)), saved

    def _asked(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> list[_Asked]:
        """Deal bags to parts; they stand slot after slot, as many in each, or one for each slot."""
        per_slot = (len(offsets) - 1) // self._num_slots
        if len(self._parts) == 1 or not per_slot:
            return [(part, ids, offsets, weights) for part in self._parts]
        firsts, asked = offsets[::per_slot].tolist(), list[_Asked]()
        for part in self._parts:
            span = slice(firsts[part.slots.start], firsts[part.slots.stop])
            ends = offsets[part.slots.start * per_slot : part.slots.stop * per_slot + 1] - span.start
            asked.append((part, ids[span], ends, None if weights is None else weights[span]))
        return asked

    def _sums_as_they_came(self, bags: Bags, lengths: Tensor, *, training: bool) -> tuple[Tensor, Any]:
        """The sum of each ragged bag, in the order the bags came: each run of slots is looked up as one table."""
        starts, num_ids = [run.slots.start for run in self._runs], np.array([[len(bags.ids)]])
        first_rows = np.tile(self._first_rows, bags.num_sources)
        of_bags = repeated(first_rows, bags.table.reshape(-1), bags.ids.device)
        ids = bags.ids + spread(of_bags, lengths, len(bags.ids))
        counts = np.add.reduceat(bags.table, starts, axis=1)  # [W, runs]
        if len(starts) > 1:
            num_ids = sums(lengths.cpu().numpy(), np.append(0, counts.cumsum())).reshape(counts.shape)
        of_ids = Cells(num_ids)
        offsets = map(offsets_of, Cells(counts).dealt(lengths))
        weights = [None] * len(starts) if bags.weights is None else of_ids.dealt(bags.weights)
        asked = list(zip(self._runs, of_ids.dealt(ids), offsets, weights, strict=True))
        results = _looked_up(asked, training=training)
        cells = Cells(counts * [run.tables.total_D for run in self._runs])
        rows = cells.as_they_came(_joined([own.view(-1) for own in results], 0))
        return rows, _Saved(results, asked, cells) if training else None

    def backward(self, saved: Any, gradient: Tensor) -> Sequence[Tensor | None]:
        self._num_steps += 1
        results, cells = saved.take(), saved.cells
        if cells is None:
            widths = [result.shape[1] for result in results]
            gradients = gradient.view(len(results[0]), sum(widths)).split(widths, 1)
        else:
            flat = cells.slot_major(gradient.view(-1, saved.width)).reshape(-1)
            gradients = flat.split([result.numel() for result in results])

        def go_back(pair: tuple[Tensor, Tensor]) -> None:
            pair[0].backward(pair[1].view_as(pair[0]))

        in_threads(go_back, list(zip(results, gradients, strict=True)))
        return ()

    def weight(self, block: int) -> Tensor:
        # Not detach(): reading them for a state dict would count as a change, which FBGEMM's graph refuses.
        return self._weights[block].data[: self.blocks[block].block.num_rows]

    def optimizer_state(self, block: int) -> Mapping[str, Tensor]:
        names = _STATE_NAMES[self._optimizer.name]
        if not names:
            return {}
        values = [own for part in self._parts for own in part.tables.split_optimizer_states()][block]
        stored, rows = self._weights[block].shape[0], self.blocks[block].block.num_rows
        states = {
            name: value.detach().view(stored, -1)[:rows] for name, value in zip(names, values, strict=True)
        }
        return {"step": self._num_steps, **states}

    def load_step(self, step: float) -> None:
        self._num_steps.fill_(step)
        # FBGEMM's own counter, which its bias corrections read; it lives on the host.
        for part in (*self._parts, *self._runs):
            part.tables.set_optimizer_step(int(step))

    def set_learning_rate(self, learning_rate: float) -> None:
        for part in self._parts:
            part.tables.set_learning_rate(learning_rate)


def _dealt(blocks: Sequence[BlockSpec], device: torch.device) -> list[_Part]:
    """The blocks in order, a part for each thread."""
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    slots = np.cumsum([0, *(spec.num_slots for spec in blocks)])
    columns = np.cumsum([0, *(spec.num_slots * spec.block.num_columns for spec in blocks)])
    bounds = np.unique(np.searchsorted(columns, columns[-1] * np.arange(threads + 1) / threads)).tolist()
    return [
        _Part(
            table_batched_embedding(blocks[start:stop], device),
            slice(int(slots[start]), int(slots[stop])),
        )
        for start, stop in pairwise(bounds)
    ]


def _looked_up(asked: Sequence[_Asked], *, training: bool) -> list[Tensor]:
    """Each part's result, by a thread."""
    return in_threads(lambda own: own[0].look_up(*own[1:], training=training), asked)


def _runs_of(part: _Part) -> Iterator[tuple[_Part, Ints]]:
    """Neighbouring slots of one width as one table: their blocks' rows stand one after the other in one tensor.

    FBGEMM wants as many bags in each of its features; in one feature all bags are looked up as they came.

    Yields:
        The run, and the first row of each of its slots.
    """
    specs = [part.tables.embedding_specs[table][:2] for table in part.tables.feature_table_map]
    starts, first = part.tables.weights_offsets.tolist(), 0
    stops = [start + rows * columns for start, (rows, columns) in zip(starts, specs, strict=True)]
    for slot in range(1, len(specs) + 1):
        columns = specs[first][1]
        if (
            slot < len(specs)
            and specs[slot][1] == columns
            and stops[slot] - starts[first] < _MOST_ROWS * columns
        ):
            continue
        run = _as_one_table(part.tables, first, (stops[slot - 1] - starts[first]) // columns)
        slots = slice(part.slots.start + first, part.slots.start + slot)
        yield _Part(run, slots), (np.array(starts[first:slot]) - starts[first]) // columns
        first = slot


def _as_one_table(
    tables: SplitTableBatchedEmbeddingBagsCodegen, first: int, num_rows: int
) -> SplitTableBatchedEmbeddingBagsCodegen:
    """An embedding of one feature over the rows of another's, from the table of its feature ``first`` on."""
    one = copy.copy(tables)
    one._buffers = {
        name: own[first : first + 1] if name.endswith(("_offsets", "_placements")) else own
        for name, own in tables._buffers.items()
    }
    one.D_offsets = tables.D_offsets[first : first + 2] - tables.D_offsets[first]
    one.total_D = int(one.D_offsets[1])
    one.hash_size_cumsum = tables.hash_size_cumsum.new_tensor([0, num_rows])
    one.rows_per_table = tables.rows_per_table.new_tensor([num_rows])
    # FBGEMM numbers a call's bags in bits that a feature's number leaves free: all bags here are of one.
    one.info_B_num_bits, one.info_B_mask = torch.ops.fbgemm.get_infos_metadata(one.D_offsets, 1, 1)
    # FBGEMM counts lookups: an embedding whose slots are several runs is looked up several times.
    one.iter, one.iter_cpu = tables.iter.clone(), tables.iter_cpu.clone()
    return one


def _joined(results: Sequence[Tensor], dim: int) -> Tensor:
    """The parts' results as one, without a graph."""
    values = [result.detach() for result in results]
    return values[0] if len(values) == 1 else torch.cat(values, dim)


def table_batched_embedding(
    blocks: Sequence[BlockSpec],
    device: torch.device,
    *,
    location: EmbeddingLocation | None = None,
    **cache: Any,
) -> SplitTableBatchedEmbeddingBagsCodegen:
    """FBGEMM's embedding of the blocks, in the device's own memory if no other location is given."""
    optimizer = blocks[0].request.optimizer
    assert optimizer is not None  # the kernel's supports()
    on_cpu = device.type == "cpu"
    if location is None:
        location = EmbeddingLocation.HOST if on_cpu else EmbeddingLocation.DEVICE
    compute = ComputeDevice.CPU if on_cpu else ComputeDevice.CUDA
    parameters = {name: value for name, value in optimizer.parameters if value is not None}
    parameters["stochastic_rounding"] = False  # sharded equals unsharded, to the last bit a half can hold
    return SplitTableBatchedEmbeddingBagsCodegen(
        embedding_specs=[
            (_stored_rows(spec) if on_cpu else spec.block.num_rows, spec.block.num_columns, location, compute)
            for spec in blocks
        ],
        feature_table_map=[index for index, spec in enumerate(blocks) for _ in range(spec.num_slots)],
        weights_precision=_PRECISIONS[blocks[0].table.data_type],
        output_dtype=SparseType.FP32,
        optimizer=_OPTIMIZERS[optimizer.name],
        learning_rate=optimizer.learning_rate,
        pooling_mode=PoolingMode.SUM if blocks[0].request.is_pooled else PoolingMode.NONE,
        device=device,
        **parameters,
        **cache,
    )


def _stored_rows(spec: BlockSpec) -> int:
    """Rows that FBGEMM stores of a block: its last ones fill a cache line, so that the next block begins with one."""
    row_bytes = spec.block.num_columns * _PRECISIONS[spec.table.data_type].bit_rate() // 8
    together = _LINE_BYTES // math.gcd(_LINE_BYTES, row_bytes)
    return -(-spec.block.num_rows // together) * together
