"""Lookups in quantised blocks: FBGEMM's kernel where it is installed, plain torch where not.

Legend: S slots (a feature in a block), B bags, N ids, D columns of a block.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from shardwright_torchrec.quant.rows import QuantizedBlock

__all__ = ["Lookup", "Slot", "lookup_of", "why_not_fbgemm"]


@frozen(eq=False)
class Slot:
    """The ids of one slot.

    Args:
        ids: ``[N]`` int64, rows of the block.
        offsets: ``[B + 1]`` int64; of as many bags in all slots.
        weights: ``[N]`` float32, or ``None``.
    """

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None


class Lookup(ABC):
    """Sums the bags of all slots of a device's blocks, or gives the rows of ids.

    Args:
        blocks: one for each slot; slots of one block follow one another.
        is_pooled: sums, else rows.
    """

    def __init__(self, blocks: Sequence[QuantizedBlock], *, is_pooled: bool) -> None:
        self.blocks, self.is_pooled = list(blocks), is_pooled
        self._read = [block.weight for block in blocks]

    @property
    def is_current(self) -> bool:
        """True if the blocks' buffers are still those that it reads."""
        return all(block.weight is read for block, read in zip(self.blocks, self._read, strict=True))

    @abstractmethod
    def __call__(self, slots: Sequence[Slot]) -> list[Tensor]:
        """Look up each slot: ``[B, D]``, or ``[N, D]`` for sequences, float32."""


class _TorchLookup(Lookup):
    """The rows that are asked for, made float32 and summed."""

    def __call__(self, slots: Sequence[Slot]) -> list[Tensor]:
        return [self._of(block, slot) for block, slot in zip(self.blocks, slots, strict=True)]

    def _of(self, block: QuantizedBlock, slot: Slot) -> Tensor:
        rows = block.rows.rows(slot.ids).dequantized()
        if not self.is_pooled:
            return rows
        places = torch.arange(len(rows), device=rows.device)
        return functional.embedding_bag(
            places, rows, slot.offsets, mode="sum", per_sample_weights=slot.weights, include_last_offset=True
        )


class _FbgemmLookup(Lookup):
    """One call of FBGEMM's table-batched kernel for integers; the blocks' values become views of its memory."""

    def __init__(self, blocks: Sequence[QuantizedBlock], *, is_pooled: bool) -> None:
        super().__init__(blocks, is_pooled=is_pooled)
        distinct = list(dict.fromkeys(blocks))
        self._kernel = _kernel(distinct, [distinct.index(block) for block in blocks], is_pooled=is_pooled)
        held = self._kernel.split_embedding_weights_with_scale_bias(split_scale_bias_mode=2)
        for block, (weight, scale, bias) in zip(distinct, held, strict=True):
            weight.copy_(block.weight)
            scale.copy_(block.weight_qscale)  # these stay the block's own: views of two types cannot be saved
            bias.copy_(block.weight_qbias)
            block.weight = weight
        self._read = [block.weight for block in blocks]

    def __call__(self, slots: Sequence[Slot]) -> list[Tensor]:
        sizes = torch.tensor([0, *(len(slot.ids) for slot in slots)]).cumsum(0)
        offsets = [slot.offsets[:-1] + start for slot, start in zip(slots, sizes, strict=False)]
        weights = [slot.weights for slot in slots if slot.weights is not None]
        result = self._kernel(
            torch.cat([slot.ids for slot in slots]),
            torch.cat([*offsets, sizes[-1:]]),
            torch.cat(weights) if weights else None,
        )
        if self.is_pooled:
            return list(result.split([block.weight.shape[1] for block in self.blocks], dim=1))
        return list(result.split([len(slot.ids) for slot in slots]))


def _kernel(blocks: Sequence[QuantizedBlock], block_of_slot: list[int], *, is_pooled: bool) -> Any:
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        BoundsCheckMode,
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
        IntNBitTableBatchedEmbeddingBagsCodegen,
    )

    shapes = [tuple(block.weight.shape) for block in blocks]
    kernel = IntNBitTableBatchedEmbeddingBagsCodegen(
        [("", rows, dim, SparseType.INT8, EmbeddingLocation.HOST) for rows, dim in shapes],
        feature_table_map=block_of_slot,
        pooling_mode=PoolingMode.SUM if is_pooled else PoolingMode.NONE,
        device="cpu",
        output_dtype=SparseType.FP32,
        bounds_check_mode=BoundsCheckMode.NONE,  # ids were checked, with names in the message
        row_alignment=1,
        indices_dtype=torch.int64,
    )
    kernel.initialize_weights()
    return kernel


@functools.cache
def why_not_fbgemm() -> str | None:
    """The reason why FBGEMM's kernel cannot be used; ``None`` if it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it says at import is not of the caller's making
            importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_inference")
            _ = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function.default
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def lookup_of(blocks: Sequence[QuantizedBlock], *, is_pooled: bool) -> Lookup:
    """The fastest lookup there is; FBGEMM's of sequences needs blocks that are equally wide."""
    same = is_pooled or len({block.weight.shape[1] for block in blocks}) == 1
    on_cpu = all(block.weight.is_cpu for block in blocks)
    kind = _FbgemmLookup if same and on_cpu and why_not_fbgemm() is None else _TorchLookup
    return kind(blocks, is_pooled=is_pooled)
