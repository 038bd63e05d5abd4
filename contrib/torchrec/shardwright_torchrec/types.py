"""Small bases of modules that scripts derive from."""

from __future__ import annotations

import copy

import torch


class CacheMixin:
    """A module that keeps results; a subclass drops them in `clear_cache`."""

    def clear_cache(self) -> None:
        """Drop what is kept: here, nothing."""


class CopyMixIn:
    """A module that knows how to copy itself to a device."""

    def copy(self, device: torch.device) -> torch.nn.Module:
        """A copy on the device."""
        return copy.deepcopy(self).to(device)  # type: ignore[attr-defined]


class ModuleNoCopyMixin(CopyMixIn):
    """A module whose copy on a device is the module itself, moved."""

    def copy(self, device: torch.device) -> torch.nn.Module:
        """The module, on the device."""
        return self.to(device)  # type: ignore[attr-defined]
