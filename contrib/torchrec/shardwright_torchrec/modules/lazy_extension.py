"""Modules whose parameters get their shapes from the first batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.nn.modules.lazy import LazyModuleMixin

import shardwright as sw

__all__ = ["LazyModuleExtensionMixin", "lazy_apply"]

_M = TypeVar("_M", bound=torch.nn.Module)
Function = Callable[[torch.nn.Module], Any]


_HOOK = "_initialize_hook"
"""Attribute of torch's lazy modules until their first forward pass."""


class LazyModuleExtensionMixin(LazyModuleMixin):
    """Torch's mixin, with an `apply` that refuses a module before its first forward pass.

    `initialize_parameters` gets the positional and keyword arguments of the first forward pass.
    """

    def apply(self, fn: Function) -> torch.nn.Module:
        """Apply a function to all modules below and this one.

        Raises:
            UnsupportedError: there was no forward pass yet; `lazy_apply` waits for it.
        """
        if hasattr(self, _HOOK):
            raise sw.UnsupportedError(
                f"{type(self).__name__} has not been initialized: run a forward pass first, or use lazy_apply"
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
