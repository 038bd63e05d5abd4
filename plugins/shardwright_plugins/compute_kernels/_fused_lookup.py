"""Lookup of the ``fused`` kernel, over FBGEMM's ``SplitTableBatchedEmbeddingBagsCodegen``.

Legend: S slots, W sources, B_w their batch sizes, N ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

from shardwright.planning.optimizers import OptimizerSpec
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


class FusedLookup(Lookup):
    """One table-batched embedding over all blocks of the group."""

    def __init__(self, blocks: Sequence[BlockSpec], *, device: torch.device) -> None:
        self.blocks = blocks
        optimizer = blocks[0].request.optimizer
        assert optimizer is not None  # the kernel's supports()
        self._optimizer = optimizer
        self.states_per_row = frozenset(_STATE_NAMES[optimizer.name] if optimizer.name in ROW_WISE else ())
        self._num_slots = sum(spec.num_slots for spec in blocks)
        self._tables = _build(blocks, optimizer, device)
        self._weights = self._tables.split_embedding_weights()
        self._num_steps = torch.zeros(())

    def forward(self, bags: Bags, *, training: bool) -> tuple[Tensor, Any]:
        ids, lengths, weights = _slot_major(bags)
        offsets = lengths.new_zeros(lengths.numel() + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=offsets[1:])
        # FBGEMM's operators for the CPU exist under autograd's dispatch keys only, which inference mode leaves out.
        with torch.inference_mode(False), torch.set_grad_enabled(training):
            sums = self._tables(ids, offsets, per_sample_weights=weights)
        return sums.detach(), sums if training else None

    def backward(self, saved: Any, gradient: Tensor) -> Sequence[Tensor | None]:
        self._num_steps += 1
        saved.backward(gradient.view_as(saved))
        return ()

    def weight(self, block: int) -> Tensor:
        return self._weights[block].detach()

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


def _build(
    blocks: Sequence[BlockSpec], optimizer: OptimizerSpec, device: torch.device
) -> SplitTableBatchedEmbeddingBagsCodegen:
    on_cpu = device.type == "cpu"
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
        pooling_mode=PoolingMode.SUM,
        device=device,
        **parameters,
    )


def _slot_major(bags: Bags) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ids, lengths and weights in the order slot, source, sample: FBGEMM's table-major bags."""
    if len(bags.batch_sizes) == 1 or bags.num_slots == 1:
        return bags.ids, bags.lengths, bags.weights
    sizes = [size for size in bags.batch_sizes for _ in range(bags.num_slots)]
    order = [
        source * bags.num_slots + slot
        for slot in range(bags.num_slots)
        for source in range(len(bags.batch_sizes))
    ]
    if len(set(bags.batch_sizes)) == 1:
        permuted = torch.ops.fbgemm.permute_2D_sparse_data(
            torch.tensor(order, dtype=torch.int32, device=bags.ids.device),
            bags.lengths.view(len(order), -1),
            bags.ids,
            bags.weights,
            bags.ids.numel(),
        )
        return permuted[1], permuted[0].view(-1), permuted[2]
    lengths = bags.lengths.split(sizes)
    counts = [int(count) for count in torch.stack([piece.sum() for piece in lengths]).tolist()]
    return (
        _permuted(bags.ids, counts, order),
        torch.cat([lengths[index] for index in order]),
        None if bags.weights is None else _permuted(bags.weights, counts, order),
    )


def _permuted(values: Tensor, counts: Sequence[int], order: Sequence[int]) -> Tensor:
    pieces = values.split(list(counts))
    return torch.cat([pieces[index] for index in order])
