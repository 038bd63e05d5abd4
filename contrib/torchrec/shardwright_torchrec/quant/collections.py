"""Collections of quantized tables under TorchRec's names, which `torch.quantization` puts in the place of others."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import shardwright_serving as serving
import torch
from torch import nn

import shardwright as sw

QuantizedCollection = serving.QuantEmbeddingBagCollection | serving.QuantEmbeddingCollection
"""Every collection of quantized tables."""

WEIGHT_TYPES: dict[torch.dtype, str] = {
    torch.int8: "INT8",
    torch.qint8: "INT8",
    torch.quint8: "INT8",
    torch.quint4x2: "INT4",
    torch.quint2x4: "INT2",
    torch.float8_e4m3fn: "FP8",
    torch.float16: "FP16",
}
"""Types that weights are asked for in -> precision of the rows."""
OUTPUT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


class QuantConfig(NamedTuple):
    """Types that modules are quantized to: classes of observers with a ``dtype``, as in `torch.quantization`."""

    activation: Any
    weight: Any
    per_table_weight_dtype: dict[str, torch.dtype] | None = None


class QuantEmbeddingBagCollection(serving.QuantEmbeddingBagCollection):
    """`EmbeddingBagCollection` with quantized rows."""

    @classmethod
    def from_float(cls, module: Any, use_precomputed_fake_quant: bool = False) -> Self:
        """Quantize a collection; see :func:`quantized`."""
        return quantized(module, cls)


class QuantEmbeddingCollection(serving.QuantEmbeddingCollection):
    """`EmbeddingCollection` with quantized rows."""

    @classmethod
    def from_float(cls, module: Any, use_precomputed_fake_quant: bool = False) -> Self:
        """Quantize a collection; see :func:`quantized`."""
        return quantized(module, cls)


def quantized(module: Any, kind: type[Any]) -> Any:
    """Quantize a float collection, whose ``qconfig`` names the types; `torch.quantization` calls it.

    Args:
        module: the float collection.
        kind: class of the result.

    Raises:
        InvalidInputError: it has no ``qconfig``, or its weights are on no device.
        UnsupportedError: a type is asked for that rows or outputs cannot have.
    """
    config = getattr(module, "qconfig", None)
    if config is None:
        raise sw.InvalidInputError(
            f"{type(module).__name__} has no qconfig: give it to quantize_dynamic(qconfig_spec=...)"
        )
    _check_types(module, config)
    own = getattr(config, "per_table_weight_dtype", None) or {}
    made = serving.quantize_embeddings(
        module,
        WEIGHT_TYPES[config.weight().dtype],
        per_table={table: WEIGHT_TYPES[dtype] for table, dtype in own.items()},
        output_dtype=config.activation().dtype,
    )
    made.__class__ = kind  # it has `from_float` beside what the class of core has, and nothing else
    return made


def _check_types(module: nn.Module, config: Any) -> None:
    asked = {"": config.weight().dtype, **(getattr(config, "per_table_weight_dtype", None) or {})}
    for table, dtype in asked.items():
        if dtype not in WEIGHT_TYPES:
            raise sw.UnsupportedError(
                f"{f'table {table!r}' if table else 'tables'} cannot be quantized to {dtype}; possible: "
                f"{', '.join(map(str, WEIGHT_TYPES))}"
            )
    if config.activation().dtype not in OUTPUT_TYPES:
        raise sw.UnsupportedError(
            f"results of {type(module).__name__} cannot be {config.activation().dtype}; they can be "
            f"{', '.join(map(str, OUTPUT_TYPES))}"
        )
