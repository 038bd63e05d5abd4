"""Small functions of names and state dicts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import MutableMapping
from typing import Any

import shardwright as sw

__all__ = ["add_prefix_to_state_dict", "append_prefix", "filter_state_dict", "none_throws"]


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
