"""Signatures of the attrs classes among public names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import attrs

import shardwright as sw


def _values(names: Iterable[str]) -> Iterator[type]:
    public = (getattr(sw, name) for name in names)
    yield from (found for found in public if isinstance(found, type) and attrs.has(found))


def arguments_of(names: Iterable[str]) -> dict[str, Any]:
    """``Class.argument`` -> its annotation in the signature."""
    return {
        f"{cls.__name__}.{argument.name}": argument.annotation
        for cls in _values(names)
        for argument in inspect.signature(cls).parameters.values()
    }


def untold(names: Iterable[str]) -> list[str]:
    """Arguments whose signature says ``Any`` where the field holds something else."""
    names = list(names)
    held = {
        f"{cls.__name__}.{field.alias}": field.type for cls in _values(names) for field in attrs.fields(cls)
    }
    told = arguments_of(names).items()
    return [name for name, annotation in told if annotation == "Any" != held.get(name)]
