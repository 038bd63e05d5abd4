"""Memory that objects hold, in bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.contracts.lookup import Lookup


def held_bytes(*values: Any) -> int:
    """Bytes of the distinct storages of all tensors and NumPy arrays that some objects hold, however deep.

    They are looked for in containers, in modules, and in attributes of objects that are no library's own.
    """
    seen: set[int] = set()
    return sum(dict(storage for value in values for storage in _storages_of(value, seen)).values())


def _storages_of(value: Any, seen: set[int]) -> Iterator[tuple[int, int]]:
    """The address and the bytes of each storage."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        try:
            address = storage.data_ptr()
        except RuntimeError:  # of a tensor that torch knows by its shape only, whose elements are elsewhere
            address = id(value)
        yield address, storage.nbytes()
        if value.is_leaf and value.grad is not None:
            yield from _storages_of(value.grad, seen)
    elif isinstance(value, np.ndarray):
        whole = value if value.base is None or not isinstance(value.base, np.ndarray) else value.base
        yield whole.ctypes.data, whole.nbytes
    else:
        for item in _parts_of(value):
            yield from _storages_of(item, seen)


def _parts_of(value: Any) -> Sequence[Any]:
    """List the objects that an object holds."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    library = type(value).__module__.split(".")[0]
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer | Lookup) or library not in _LIBRARIES:
        names = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
        slots = [getattr(value, name) for name in names if isinstance(name, str) and hasattr(value, name)]
        return [*getattr(value, "__dict__", {}).values(), *slots]
    return []


_LIBRARIES = frozenset(
    {"attr", "attrs", "builtins", "collections", "functools", "numba", "numpy", "torch", "types"}
)
