"""Lookup of the ``quant_fbgemm`` kernel, over FBGEMM's ``IntNBitTableBatchedEmbeddingBagsCodegen``.

Legend: S slots, W sources, B_w their batch sizes, N ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen
from torch import Tensor

from shardwright import Bags, BlockSpec
from shardwright_plugins.kernel_parts.by_fbgemm import Cells, offsets_of, offsets_of_ids, slot_major
from shardwright_serving.kernels._lookup import QuantizedLookup, as_rows

_PRECISIONS = {
    "INT8": SparseType.INT8,
    "INT4": SparseType.INT4,
    "INT2": SparseType.INT2,
    "FP16": SparseType.FP16,
}


class QuantFbgemmLookup(QuantizedLookup):
    """One table-batched embedding over all blocks of the group; weights are views of its memory."""

    def __init__(self, blocks: Sequence[BlockSpec], *, device: torch.device) -> None:
        self.blocks = blocks
        self._kernel = _embedding(blocks, device)
        # Rows are padded to 16 bytes on CUDA; what is before that is the row.
        self._weights = [
            as_rows(own[0], spec)
            for own, spec in zip(self._kernel.split_embedding_weights(False), blocks, strict=True)
        ]
        for weight in self._weights:
            weight.zero_()

    def forward(self, bags: Bags, *, training: bool) -> tuple[Tensor, Any]:
        if bags.lengths is not None:
            ids, lengths, weights = slot_major(bags, bags.lengths)
            return self._kernel(ids, offsets_of(lengths), weights), None
        cells, offsets = Cells(bags.table), offsets_of_ids(bags.table.sum(0), bags.ids.device)
        return cells.as_they_came(self._kernel(cells.slot_major(bags.ids), offsets, None)), None

    def weight(self, block: int) -> Tensor:
        return self._weights[block]


def _embedding(blocks: Sequence[BlockSpec], device: torch.device) -> Any:
    location = EmbeddingLocation.HOST if device.type == "cpu" else EmbeddingLocation.DEVICE
    embedding = IntNBitTableBatchedEmbeddingBagsCodegen(
        [
            ("", spec.block.num_rows, spec.block.num_columns, _PRECISIONS[spec.request.data_type], location)
            for spec in blocks
        ],
        feature_table_map=[index for index, spec in enumerate(blocks) for _ in range(spec.num_slots)],
        pooling_mode=PoolingMode.SUM if blocks[0].request.is_pooled else PoolingMode.NONE,
        device=device,
        output_dtype=SparseType.FP32,
        bounds_check_mode=BoundsCheckMode.NONE,  # ids were checked, with names in the message
        indices_dtype=torch.int64,
    )
    embedding.initialize_weights()
    return embedding
