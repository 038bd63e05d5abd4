"""Keys of `fused_params` that sharders of quantised tables take, and do not need."""

from __future__ import annotations

__all__ = [
    "FUSED_PARAM_BOUNDS_CHECK_MODE",
    "FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS",
    "FUSED_PARAM_REGISTER_TBE_BOOL",
]

FUSED_PARAM_REGISTER_TBE_BOOL: str = "__register_tbes_in_named_modules"
FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS: str = "__register_quant_state_dict_split_scale_bias"
FUSED_PARAM_BOUNDS_CHECK_MODE: str = "__register_tbe_bounds_check_mode"
