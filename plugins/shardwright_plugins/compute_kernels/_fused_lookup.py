"""Lookup of the ``fused`` kernel, over FBGEMM's ``SplitTableBatchedEmbeddingBagsCodegen``.

Legend: S slots, W sources, B_w their batch sizes, N ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from shardwright.planning.tables import DataType
from shardwright.runtime.lookup import Bags, BlockSpec, Lookup
from shardwright_plugins.compute_kernels._optimizers import ROW_WISE

_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "row_wise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
}
_PRECISIONS = {DataType.FP32: SparseType.FP32, DataType.FP16: SparseType.FP16, DataType.BF16: SparseType.BF16}
# The torch optimizers' names for FBGEMM's state tensors, in FBGEMM's order.
_STATE_NAMES = {
    "sgd": (),
    "adagrad": ("sum",),
    "row_wise_adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
}


class _Saved:
    """What backward passes need of a forward pass.

    FBGEMM's graph serves one, after which the weights are others; for a further one the lookup is made again.

    Args:
        result: FBGEMM's result.
        call: makes it again.
        bags: the bags, where its order is not that in which they came.
    """

    def __init__(self, result: Tensor, call: Callable[[], Tensor], bags: Bags | None = None) -> None:
        self._result: Tensor | None = result
        self._call, self.bags = call, bags

    def take(self) -> Tensor:
        """The result, with a graph that has not been gone through."""
        result, self._result = self._result, None
        return self._call() if result is None else result


class FusedLookup(Lookup):
    """One table-batched embedding over all blocks of the group."""

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
        self._tables = table_batched_embedding(blocks, device) if tables is None else tables
        self._weights = self._tables.split_embedding_weights()
        self._num_steps = torch.zeros((), dtype=torch.float32, device="cpu")

    def forward(self, bags: Bags, *, training: bool) -> tuple[Tensor, Any]:
        if bags.lengths is None:
            return self._rows_of_ids(bags, training=training)
        ids, lengths, weights = _slot_major(bags, bags.lengths)
        call = partial(self._call, ids, _offsets(lengths), weights, training=training)
        sums = call()
        return sums.detach(), _Saved(sums, call) if training else None

    def _rows_of_ids(self, bags: Bags, *, training: bool) -> tuple[Tensor, Any]:
        """A row for each id, in the order the ids came."""
        num_sources, num_slots = len(bags.counts), bags.num_slots
        slot_first = [(source, slot) for slot in range(num_slots) for source in range(num_sources)]
        ids = torch.cat([_split(bags.ids, bags)[source * num_slots + slot] for source, slot in slot_first])
        totals = torch.tensor([sum(own) for own in zip(*bags.counts, strict=True)], device=ids.device)
        call = partial(self._call, ids, _offsets(totals), None, training=training)
        rows = call()
        sizes = [bags.counts[source][slot] for source, slot in slot_first]
        back = [slot * num_sources + source for source in range(num_sources) for slot in range(num_slots)]
        if num_sources == 1:
            return rows.detach(), _Saved(rows, call) if training else None
        pieces = rows.detach().split(sizes)
        return torch.cat([pieces[index] for index in back]), _Saved(rows, call, bags) if training else None

    def _call(self, ids: Tensor, offsets: Tensor, weights: Tensor | None, *, training: bool) -> Tensor:
        # FBGEMM's operators for the CPU exist under autograd's dispatch keys only, which inference mode leaves out.
        with torch.inference_mode(False), torch.set_grad_enabled(training):
            result: Tensor = self._tables(ids, offsets, per_sample_weights=weights)
        return result

    def backward(self, saved: Any, gradient: Tensor) -> Sequence[Tensor | None]:
        self._num_steps += 1
        result, bags = saved.take(), saved.bags
        if bags is not None:
            pieces = _split(gradient.view(-1, result.shape[1]) if result.numel() else result.detach(), bags)
            num_slots = bags.num_slots
            order = [
                source * num_slots + slot for slot in range(num_slots) for source in range(len(bags.counts))
            ]
            gradient = torch.cat([pieces[index] for index in order])
        result.backward(gradient.view_as(result))
        return ()

    def weight(self, block: int) -> Tensor:
        # Not detach(): reading them for a state dict would count as a change, which FBGEMM's graph refuses.
        return self._weights[block].data

    def optimizer_state(self, block: int) -> Mapping[str, Tensor]:
        names = _STATE_NAMES[self._optimizer.name]
        if not names:
            return {}
        values = self._tables.split_optimizer_states()[block]
        rows = self._weights[block].shape[0]
        states = {name: value.detach().view(rows, -1) for name, value in zip(names, values, strict=True)}
        return {"step": self._num_steps, **states}

    def load_step(self, step: float) -> None:
        self._num_steps.fill_(step)
        # FBGEMM's own counter, which its bias corrections read; it lives on the host.
        self._tables.set_optimizer_step(int(step))

    def set_learning_rate(self, learning_rate: float) -> None:
        self._tables.set_learning_rate(learning_rate)


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
    return SplitTableBatchedEmbeddingBagsCodegen(
        embedding_specs=[(spec.block.num_rows, spec.block.num_columns, location, compute) for spec in blocks],
        feature_table_map=[index for index, spec in enumerate(blocks) for _ in range(spec.num_slots)],
        weights_precision=_PRECISIONS[blocks[0].table.data_type],
        output_dtype=SparseType.FP32,
        optimizer=_OPTIMIZERS[optimizer.name],
        learning_rate=optimizer.learning_rate,
        stochastic_rounding=False,  # sharded equals unsharded, to the last bit a half can hold
        pooling_mode=PoolingMode.SUM if blocks[0].request.is_pooled else PoolingMode.NONE,
        device=device,
        **parameters,
        **cache,
    )


def _offsets(lengths: Tensor) -> Tensor:
    offsets = lengths.new_zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def _split(values: Tensor, bags: Bags) -> tuple[Tensor, ...]:
    """The ids' values of each (source, slot), where every id is a bag."""
    return values.split(bags.flat_counts)


def _slot_major(bags: Bags, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ids, lengths and weights in the order slot, source, sample: FBGEMM's table-major bags."""
    num_sources, num_slots = len(bags.counts), bags.num_slots
    if num_sources == 1 or num_slots == 1:
        return bags.ids, lengths, bags.weights
    order = [source * num_slots + slot for slot in range(num_slots) for source in range(num_sources)]
    if len(set(bags.flat_counts)) == 1:
        permuted = torch.ops.fbgemm.permute_2D_sparse_data(
            torch.tensor(order, dtype=torch.int32, device=bags.ids.device),
            lengths.view(len(order), -1),
            bags.ids,
            bags.weights,
            bags.ids.numel(),
        )
        return permuted[1], permuted[0].view(-1), permuted[2]
    pieces = lengths.split(bags.flat_counts)
    counts = torch.stack([piece.sum() for piece in pieces]).tolist()
    return (
        _permuted(bags.ids, counts, order),
        torch.cat([pieces[index] for index in order]),
        None if bags.weights is None else _permuted(bags.weights, counts, order),
    )


def _permuted(values: Tensor, counts: Sequence[int], order: Sequence[int]) -> Tensor:
    pieces = values.split(list(counts))
    return torch.cat([pieces[index] for index in order])
