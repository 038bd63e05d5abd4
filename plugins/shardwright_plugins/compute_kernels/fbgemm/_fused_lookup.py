"""Lookup of the ``fused`` kernel, over FBGEMM's ``SplitTableBatchedEmbeddingBagsCodegen``.

Legend: S slots, W sources, B_w their batch sizes, N ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

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
from shardwright.runtime.ranks.devices import is_host, sent_to
from shardwright.runtime.step.segments import starts_of, sums, take
from shardwright_plugins.compute_kernels._optimizers import ROW_WISE
from shardwright_plugins.compute_kernels._threads import in_threads

_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "row_wise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
}
_LINE_BYTES = 64
"""A cache line of x86-64 and of most ARM."""
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
        columns: its columns, among those of a pooled result.
    """

    tables: SplitTableBatchedEmbeddingBagsCodegen
    slots: slice
    columns: slice

    @cached_property
    def without_gradient(self) -> Tensor:
        """Zeros for FBGEMM, which else computes gradients of ids' weights, as if they were trained: ``[slots]``."""
        num_slots = self.slots.stop - self.slots.start
        return torch.zeros(num_slots, dtype=torch.int32, device=self.tables.current_device)


class _Saved:
    """The state of a forward pass that backward passes need.

    FBGEMM's graph serves one backward pass, which changes the weights. For a further one the lookup is made again.

    Args:
        results: FBGEMM's results, of each part.
        call: function that makes them again.
        cells: rows of each source and slot, if FBGEMM's order may differ from that in which they came.
    """

    def __init__(
        self, results: list[Tensor], call: Callable[[], list[Tensor]], cells: Cells | None = None
    ) -> None:
        self._results: list[Tensor] | None = results
        self._call, self.cells = call, cells

    def forget(self) -> None:
        """Let the lookup be made again for the backward pass."""
        self._results = None

    def take(self) -> list[Tensor]:
        """The results, with graphs that have not been gone through."""
        results, self._results = self._results, None
        return self._call() if results is None else results


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
        self._parts = _dealt(blocks, device) if tables is None else [_whole(blocks, tables)]
        self._weights = [own for part in self._parts for own in part.tables.split_embedding_weights()]
        self._num_steps = torch.zeros((), dtype=torch.float32, device="cpu")

    def forward(self, bags: Bags, *, training: bool) -> tuple[Tensor, Any]:
        if bags.lengths is None:
            return self._rows_of_ids(bags, training=training)
        ids, lengths, weights = slot_major(bags, bags.lengths)
        call = partial(self._call, ids, offsets_of(lengths), weights, training=training)
        sums = call()
        return _joined(sums, 1), _Saved(sums, call) if training else None

    def _rows_of_ids(self, bags: Bags, *, training: bool) -> tuple[Tensor, Any]:
        """A row for each id, in the order the ids came."""
        cells = Cells(bags.table)
        offsets = offsets_of_ids(bags.table.sum(0), bags.ids.device)
        call = partial(self._call, cells.slot_major(bags.ids), offsets, None, training=training)
        rows = call()
        return cells.as_they_came(_joined(rows, 0)), _Saved(rows, call, cells) if training else None

    def _call(self, ids: Tensor, offsets: Tensor, weights: Tensor | None, *, training: bool) -> list[Tensor]:
        """Each part's result; bags stand slot after slot, as many in each, or one for each slot."""
        per_slot = (len(offsets) - 1) // self._num_slots
        firsts = offsets[::per_slot].tolist() if len(self._parts) > 1 and per_slot else []

        def look_up(part: _Part) -> Tensor:
            own, ends, factors = ids, offsets, weights
            if firsts:
                span = slice(firsts[part.slots.start], firsts[part.slots.stop])
                own, factors = ids[span], None if weights is None else weights[span]
                ends = offsets[part.slots.start * per_slot : part.slots.stop * per_slot + 1] - span.start
            # FBGEMM's operators for the CPU exist under autograd's dispatch keys only, which inference mode leaves out.
            with torch.inference_mode(False), torch.set_grad_enabled(training):
                untrained = None if factors is None else part.without_gradient
                result: Tensor = part.tables(
                    own, ends, per_sample_weights=factors, feature_requires_grad=untrained
                )
            return result

        return in_threads(look_up, self._parts)

    def backward(self, saved: Any, gradient: Tensor) -> Sequence[Tensor | None]:
        self._num_steps += 1
        results, cells = saved.take(), saved.cells
        if cells is not None:
            sizes = [len(result) for result in results]
            rows = cells.slot_major(gradient.view(sum(sizes), results[0].shape[1]))
            gradients: Sequence[Tensor] = rows.split(sizes)
        else:
            matrix = gradient.view(len(results[0]), sum(result.shape[1] for result in results))
            gradients = [matrix[:, part.columns] for part in self._parts]

        def go_back(pair: tuple[Tensor, Tensor]) -> None:
            pair[0].backward(pair[1])

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
        for part in self._parts:
            part.tables.set_optimizer_step(int(step))

    def set_learning_rate(self, learning_rate: float) -> None:
        for part in self._parts:
            part.tables.set_learning_rate(learning_rate)


def _whole(blocks: Sequence[BlockSpec], tables: SplitTableBatchedEmbeddingBagsCodegen) -> _Part:
    """All blocks in one."""
    return _Part(tables, slice(0, sum(spec.num_slots for spec in blocks)), slice(None))


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
            slice(int(columns[start]), int(columns[stop])),
        )
        for start, stop in pairwise(bounds)
    ]


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


def offsets_of_ids(counts: Ints, device: torch.device) -> Tensor:
    """Offsets of bags that hold a slot's ids, as many bags in each slot: ``[bags + 1]``.

    On the CPU a slot's ids are one bag. On a device FBGEMM gives a bag one warp, so each id is a bag; slots with fewer
    ids than others have empty bags at their end.

    Args:
        counts: ids of each slot, ``[S]``.
        device: device of the offsets.
    """
    starts = starts_of(counts)
    if is_host(device):
        return torch.from_numpy(np.append(starts, counts.sum()))
    first, own = sent_to(device, starts)[:, None], sent_to(device, counts)[:, None]
    number = torch.arange(int(counts.max(initial=1)), device=device)
    return torch.cat([(first + torch.minimum(number, own)).view(-1), (first + own)[-1]])


def offsets_of(lengths: Tensor) -> Tensor:
    offsets = lengths.new_zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


class Cells:
    """Reordering of values that come by source, then by slot, to FBGEMM's order: by slot, then by source.

    Args:
        sizes: number of elements of each source and slot, ``[W, S]``.
    """

    def __init__(self, sizes: Ints) -> None:
        self._sizes = np.ascontiguousarray(sizes.T).reshape(-1)
        self._place = np.arange(sizes.size).reshape(sizes.shape).T.reshape(-1)
        self._starts = starts_of(sizes.reshape(-1))[self._place]

    def slot_major(self, values: Tensor) -> Tensor:
        """The elements slot after slot."""
        return take(values, self._starts, self._sizes)

    def as_they_came(self, values: Tensor) -> Tensor:
        """Reorder from FBGEMM's order to that in which values came."""
        back = np.argsort(self._place)
        return take(values, starts_of(self._sizes)[back], self._sizes[back])


def slot_major(bags: Bags, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ids, lengths and weights in the order slot, source, sample: FBGEMM's table-major bags."""
    counts, weights = bags.table, bags.weights
    if bags.num_sources == 1 or bags.num_slots == 1:
        return bags.ids, lengths, weights
    if (counts == counts[0, 0]).all():
        order = np.arange(counts.size, dtype=np.int32).reshape(counts.shape).T.reshape(-1)
        permuted = torch.ops.fbgemm.permute_2D_sparse_data(
            sent_to(bags.ids.device, order),
            lengths.view(counts.size, -1),
            bags.ids,
            weights,
            bags.ids.numel(),
        )
        return permuted[1], permuted[0].view(-1), permuted[2]
    bounds = np.append(0, np.cumsum(counts))
    num_ids = Cells(sums(lengths.cpu().numpy(), bounds).reshape(counts.shape))
    return (
        num_ids.slot_major(bags.ids),
        Cells(counts).slot_major(lengths),
        None if weights is None else num_ids.slot_major(weights),
    )
