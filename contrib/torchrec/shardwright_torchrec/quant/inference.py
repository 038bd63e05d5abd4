"""Models for serving: quantized in one call, and cut in another."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import shardwright as sw
from shardwright_torchrec.distributed.types import BoundsCheckMode
from shardwright_torchrec.quant.collections import (
    QuantConfig,
    QuantEmbeddingBagCollection,
    QuantEmbeddingCollection,
)
from shardwright_torchrec.quant.sharding import (
    QuantEmbeddingBagCollectionSharder,
    QuantEmbeddingCollectionSharder,
    QuantizedSharder,
    placed,
    shard_modules,
)

MAPPING: Mapping[type[nn.Module], type[Any]] = {
    sw.EmbeddingBagCollection: QuantEmbeddingBagCollection,
    sw.EmbeddingCollection: QuantEmbeddingCollection,
}
"""Collections -> what they become."""


def quantize_embeddings(
    module: nn.Module,
    dtype: torch.dtype = torch.int8,
    inplace: bool = False,
    additional_mapping: Mapping[type[nn.Module], type[Any]] | None = None,
    output_dtype: torch.dtype = torch.float,
    per_table_weight_dtype: dict[str, torch.dtype] | None = None,
) -> nn.Module:
    """Put quantized collections in the place of all collections of tables.

    Args:
        module: a model, or a collection.
        dtype: type of the weights: 8-bit integers, ``torch.quint4x2``, ``torch.quint2x4``, float8 e4m3 or float16.
        inplace: change this model, and make no copy.
        additional_mapping: other classes of collections -> what they become, by their ``from_float``.
        output_dtype: dtype of the results.
        per_table_weight_dtype: table -> another type.

    Raises:
        UnsupportedError: a type that was asked for is not supported.
    """
    config = QuantConfig(_observer(output_dtype), _observer(dtype), per_table_weight_dtype)
    mapping = {**MAPPING, **(additional_mapping or {})}
    model = module if inplace else copy.deepcopy(module)
    for path, found in list(model.named_modules()):
        if type(found) not in mapping:
            continue
        found.qconfig = config
        made = mapping[type(found)].from_float(found)
        if not path:
            return made
        model.set_submodule(path, made)
    return model


def quantize_inference_model(
    model: nn.Module,
    quantization_mapping: Mapping[type[nn.Module], type[Any]] | None = None,
    per_table_weight_dtype: dict[str, torch.dtype] | None = None,
    fp_weight_dtype: torch.dtype = torch.int8,
    quantization_dtype: torch.dtype = torch.int8,
    output_dtype: torch.dtype = torch.float,
) -> nn.Module:
    """`quantize_embeddings`, in place, under the name that TorchRec's later releases have for it.

    Args:
        model: a model, or a collection.
        quantization_mapping: other classes of collections -> what they become.
        per_table_weight_dtype: table -> another type.
        fp_weight_dtype: dtype of the tables behind feature processors, which are quantized as any others.
        quantization_dtype: type of the weights, as for `quantize_embeddings`.
        output_dtype: dtype of the results.

    Raises:
        UnsupportedError: a type that was asked for is not supported.
    """
    if fp_weight_dtype != quantization_dtype:
        raise sw.UnsupportedError(
            f"fp_weight_dtype={fp_weight_dtype}: all tables have quantization_dtype, {quantization_dtype}"
        )
    return quantize_embeddings(
        model,
        quantization_dtype,
        inplace=True,
        additional_mapping=quantization_mapping,
        output_dtype=output_dtype,
        per_table_weight_dtype=per_table_weight_dtype,
    )


def shard_quant_model(
    model: nn.Module,
    world_size: int = 1,
    compute_device: str = "cpu",
    sharding_device: str = "meta",
    sharders: Sequence[QuantizedSharder] | None = None,
    device_memory_size: int | None = None,
    constraints: Mapping[str, sw.ParameterConstraints] | None = None,
    ddr_cap: int | None = None,
    sharding_plan: sw.ShardingPlan | None = None,
) -> tuple[nn.Module, sw.ShardingPlan]:
    """Cut the quantized tables of a model over devices.

    Args:
        model: the quantized model.
        world_size: number of devices of this process.
        compute_device: their type. All blocks of ``"cpu"`` share its memory.
        sharding_device: not needed; nothing is allocated twice.
        sharders: sharders of the collections; by default one for each class of quantized collections.
        device_memory_size: not needed; all blocks share the process's memory.
        constraints: table -> its constraints; by default tables stay whole.
        ddr_cap: memory of each device, bytes; what the machine has by default.
        sharding_plan: plan by which they are cut; made here by default.

    Returns:
        The model, and the plan by which it is cut.

    Raises:
        UnsupportedError: there are tables for devices of another type.
    """
    if compute_device != "cpu":
        raise sw.UnsupportedError(f"quantized tables are served from 'cpu', not from {compute_device!r}")
    topology = sw.Topology(world_size=world_size, compute_device=compute_device, ddr_cap=ddr_cap)
    plan = sharding_plan or placed(model, topology, constraints or {})
    return shard_modules(model, device=compute_device, plan=plan, sharders=sharders), plan


def trim_torch_package_prefix_from_typename(typename: str) -> str:
    """The name of a class without the prefix that `torch.package` puts before it."""
    return typename.partition(".")[2] if typename.startswith("<torch_package_") else typename


DEFAULT_QUANTIZATION_DTYPE: torch.dtype = torch.int8
DEFAULT_QUANT_MAPPING: dict[str, type[Any]] = {torch.typename(kind): made for kind, made in MAPPING.items()}
"""Name of a class of collections -> what it becomes."""
DEFAULT_FUSED_PARAMS: dict[str, Any] = {
    "__register_tbes_in_named_modules": True,
    "__register_quant_state_dict_split_scale_bias": True,
    "__register_tbe_bounds_check_mode": BoundsCheckMode.NONE,
}
"""TorchRec's parameters of FBGEMM's modules, which sharders of quantized tables take and do not need."""
DEFAULT_SHARDERS: list[QuantizedSharder] = [
    QuantEmbeddingBagCollectionSharder(DEFAULT_FUSED_PARAMS),
    QuantEmbeddingCollectionSharder(DEFAULT_FUSED_PARAMS),
]


def _observer(dtype: torch.dtype) -> Any:
    from torch.ao.quantization import PlaceholderObserver

    return PlaceholderObserver.with_args(dtype=dtype)
