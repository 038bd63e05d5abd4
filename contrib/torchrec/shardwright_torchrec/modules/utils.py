"""Small functions of dense modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import shardwright as sw

__all__ = [
    "check_module_output_dimension",
    "convert_list_of_modules_to_modulelist",
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


def convert_list_of_modules_to_modulelist(modules: Iterable[Any], sizes: tuple[int, ...]) -> nn.ModuleList:
    """Nested lists of modules as nested `ModuleList`s.

    Args:
        modules: modules, or lists of them.
        sizes: lengths of the lists, the outermost first.

    Raises:
        InvalidInputError: a list has another length.
    """
    items = list(modules)
    if len(items) != sizes[0]:
        raise sw.InvalidInputError(f"a list of {len(items)} modules was to have {sizes[0]}, of sizes {sizes}")
    if len(sizes) == 1:
        return nn.ModuleList(items)
    return nn.ModuleList(convert_list_of_modules_to_modulelist(item, sizes[1:]) for item in items)
