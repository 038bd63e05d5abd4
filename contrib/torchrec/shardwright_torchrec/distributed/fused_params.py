"""Keys of `fused_params` that TorchRec's scripts give: those of FBGEMM become shardwright's, or are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import shardwright as sw

FUSED_PARAM_REGISTER_TBE_BOOL: str = "__register_tbes_in_named_modules"
FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS: str = "__register_quant_state_dict_split_scale_bias"
FUSED_PARAM_BOUNDS_CHECK_MODE: str = "__register_tbe_bounds_check_mode"

# Values of FBGEMM's EmbOptimType, and spellings of scripts.
_OPTIMIZERS = {
    "exact_sgd": "sgd",
    "exact_adagrad": "adagrad",
    "rowwise_adagrad": "row_wise_adagrad",
    "exact_row_wise_adagrad": "row_wise_adagrad",
    "exact_rowwise_adagrad": "row_wise_adagrad",
    "partial_rowwise_adam": "partial_row_wise_adam",
    "partial_rowwise_lamb": "partial_row_wise_lamb",
    "lars_sgd": "lars",
}
# FBGEMM's BoundsCheckMode by value and name, and the level of checks that does what it says.
_LEVELS = {"fatal": "standard", "warning": "warning", "ignore": "ignore", "none": "off"}

_SIZE = "the cache holds the part of a table's rows that cache_load_factor says; give that instead"
_INSTEAD = {
    "cache_reserved_memory": _SIZE,
    "cache_sets": _SIZE,
    "cache_precision": "rows in the cache have the table's own data_type; leave it out, or give the table another one",
    "enforce_hbm": "optimizer states lie where the compute kernel keeps them; name another in compute_kernels",
}
_OF_BATCHES = ("bounds_check_mode", "output_dtype", "prefetch_pipeline")


def own_params(fused_params: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The settings under shardwright's names, without those that are not about optimizer, cache or clipping.

    Raises:
        UnsupportedError: a key asks for something that there is not; the text has what there is.
    """
    if fused_params is None:
        return None
    for name, instead in _INSTEAD.items():
        if fused_params.get(name):
            raise sw.UnsupportedError(f"fused_params[{name!r}] is {fused_params[name]!r}: {instead}")
    _check_output(fused_params.get("output_dtype"))
    return {
        name: _optimizer(value) if name == "optimizer" else _plain(value)
        for name, value in fused_params.items()
        if name not in _INSTEAD and name not in _OF_BATCHES
    }


def checks_of(fused_params: Mapping[str, Any] | None) -> str | None:
    """The level of checks of batches that FBGEMM's `bounds_check_mode` stands for; none without it.

    Raises:
        InvalidInputError: there is no such mode.
    """
    mode = (fused_params or {}).get("bounds_check_mode")
    if mode is None:
        return None
    given = getattr(mode, "name", mode)
    if isinstance(given, int) and 0 <= given < len(_LEVELS):
        given = list(_LEVELS)[given]
    name = str(given).lower().removeprefix("v2_")  # the second version of FBGEMM's kernel checks the same
    if name not in _LEVELS:
        modes = ", ".join(map(str.upper, _LEVELS))
        raise sw.InvalidInputError(f"bounds_check_mode must be one of {modes}, got {mode!r}")
    return _LEVELS[name]


def _optimizer(optimizer: Any) -> Any:
    name = optimizer.value if isinstance(optimizer, Enum) else optimizer
    return _OPTIMIZERS.get(name.lower(), name) if isinstance(name, str) else name


def _plain(value: Any) -> Any:
    """A value; members of FBGEMM's enumerations, as `WeightDecayMode`, by their names."""
    return value.name.lower() if isinstance(value, Enum) else value


def _check_output(dtype: Any) -> None:
    if dtype is None or str(getattr(dtype, "value", dtype)).upper() in ("FP32", "TORCH.FLOAT32"):
        return
    raise sw.UnsupportedError(
        f"fused_params['output_dtype'] is {dtype!r}: lookups give float32. To send results in half the bytes, give a "
        "codec: qcomm_codecs_registry=QCommsConfig(forward_precision='fp16')"
    )
