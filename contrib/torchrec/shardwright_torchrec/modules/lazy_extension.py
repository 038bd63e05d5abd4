"""Modules whose parameters get their shapes from the first batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.nn.modules.lazy import LazyModuleMixin, is_lazy

import shardwright as sw

__all__ = ["LazyModuleExtensionMixin", "lazy_apply"]

_M = TypeVar("_M", bound=torch.nn.Module)
Function = Callable[[torch.nn.Module], Any]


def _is_unshaped(module: torch.nn.Module) -> bool:
    return any(map(is_lazy, (*module.parameters(recurse=False), *module.buffers(recurse=False))))


class LazyModuleExtensionMixin(LazyModuleMixin):
    """Torch's mixin, with an `apply` that refuses parameters without a shape.

    `initialize_parameters` gets the positional and keyword arguments of the first forward pass.
    """

    def apply(self, fn: Function) -> torch.nn.Module:
        """Apply a function to all modules below and this one.

        Raises:
            InvalidInputError: parameters have no shape yet; `lazy_apply` waits for them.
        """
        if any(map(_is_unshaped, self.modules())):  # type: ignore[attr-defined]
            raise sw.InvalidInputError(
                f"{type(self).__name__} has parameters without a shape: run a forward pass first, or use lazy_apply"
            )
        return super().apply(fn)  # type: ignore[misc]


def lazy_apply(module: _M, fn: Function) -> _M:
    """Apply a function to all modules below and this one, right after the first forward pass.

    Functions that are given one after the other are applied in that order.

    Args:
        module: the module.
        fn: function of a module.

    Returns:
        The module.
    """

    def apply_once(*_: Any) -> None:
        hook.remove()
        module.apply(fn)

    hook = module.register_forward_hook(apply_once)
    return module
