"""Small functions of names and state dicts."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright_torchrec.distributed.interfaces import ShardedModule
from shardwright_torchrec.types import CopyMixIn

__all__ = [
    "CopyableMixin",
    "add_prefix_to_state_dict",
    "append_prefix",
    "copy_to_device",
    "filter_state_dict",
    "get_unsharded_module_names",
    "init_parameters",
    "none_throws",
]


def append_prefix(prefix: str, name: str) -> str:
    """A name below a path."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def filter_state_dict(state_dict: MutableMapping[str, Any], name: str) -> OrderedDict[str, Any]:
    """The entries below a path, without it."""
    return OrderedDict(
        (key[len(name) + 1 :], value) for key, value in state_dict.items() if key.startswith(f"{name}.")
    )


def add_prefix_to_state_dict(state_dict: MutableMapping[str, Any], prefix: str) -> None:
    """Put a prefix before all names, in place."""
    for key in list(state_dict):
        state_dict[prefix + key] = state_dict.pop(key)


def none_throws(optional: Any, message: str = "Unexpected `None`") -> Any:
    """A value that is not `None`.

    Raises:
        InvalidInputError: it is.
    """
    if optional is None:
        raise sw.InvalidInputError(message)
    return optional


class CopyableMixin(CopyMixIn, nn.Module):
    """A module that copies itself to a device."""


def copy_to_device(module: nn.Module, current_device: torch.device, to_device: torch.device) -> nn.Module:
    """A copy of a module, with what is on one device on another.

    Args:
        module: the module; a sharded collection cannot be copied.
        current_device: device of the tensors that are moved; others stay where they are.
        to_device: device of the copies.
    """
    copied = copy.deepcopy(module)

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(to_device) if tensor.device == torch.device(current_device) else tensor

    for part in copied.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(moved(parameter.detach()), parameter.requires_grad))
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, moved(buffer))
    return copied


def get_unsharded_module_names(model: nn.Module) -> list[str]:
    """Paths of the largest modules that have no sharded collection in them."""
    if not any(isinstance(module, ShardedModule) for module in model.modules()):
        return [""]
    return [] if isinstance(model, ShardedModule) else list(_unsharded_below(model, ""))


def _unsharded_below(module: nn.Module, prefix: str) -> Iterator[str]:
    for name, child in module.named_children():
        if not any(isinstance(part, ShardedModule) for part in child.modules()):
            yield f"{prefix}{name}"
        elif not isinstance(child, ShardedModule):
            yield from _unsharded_below(child, f"{prefix}{name}.")


@torch.no_grad()
def init_parameters(module: nn.Module, device: torch.device) -> None:
    """Bring a module to a device, and initialise its parameters if they are not there yet."""
    parameters = list(module.parameters())
    if all(parameter.device == torch.device(device) for parameter in parameters):
        return
    if any(parameter.is_meta for parameter in parameters):
        module.to_empty(device=device)
    else:
        module.to(device)
    for part in module.modules():
        if (reset := getattr(part, "reset_parameters", None)) is not None:
            reset()
