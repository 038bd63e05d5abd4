"""Small functions of dense modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "check_module_output_dimension",
    "extract_module_or_tensor_callable",
    "get_module_output_dimension",
    "init_mlp_weights_xavier_uniform",
]


def extract_module_or_tensor_callable(module_or_callable: Any) -> nn.Module | Callable[[Tensor], Tensor]:
    """A module or function of tensors as it is; the module that a function without arguments makes."""
    try:
        made = module_or_callable()
    except TypeError:  # it wants a tensor
        return module_or_callable  # type: ignore[no-any-return]
    return made  # type: ignore[no-any-return]


def get_module_output_dimension(module: Callable[[Tensor], Tensor] | nn.Module, in_features: int) -> int:
    """Columns of a module's output for so many columns of input."""
    return int(module(torch.zeros(1, in_features)).shape[-1])


def check_module_output_dimension(module: Any, in_features: int, out_features: int) -> bool:
    """True if a module, or each of several, has so many columns of output."""
    modules = module if isinstance(module, list | nn.ModuleList) else [module]
    return all(get_module_output_dimension(one, in_features) == out_features for one in modules)


def init_mlp_weights_xavier_uniform(m: nn.Module) -> None:
    """Initialise a linear layer: weights uniform with Xavier's variance, biases 0; for `Module.apply`."""
    if isinstance(m, nn.Linear):
        nn.init.xavier_uniform_(m.weight)
        if m.bias is not None:
            nn.init.zeros_(m.bias)
