"""Signatures of the attrs classes among public names, and what public names speak of."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
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


@functools.cache
def classes_of(package: ModuleType) -> set[str]:
    """Names of all classes at the top of a package's modules."""
    return {
        name
        for path in Path(str(package.__file__)).parent.rglob("*.py")
        for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)
    }


def _spoken_by(value: Any) -> Iterator[tuple[str, str]]:
    """Names of a class's attributes and methods, or of a function, each with an annotation of its signature."""
    if inspect.isfunction(value):
        yield from ((value.__name__, str(told)) for told in value.__annotations__.values())
        return
    for cls in value.__mro__:
        if not cls.__module__.startswith("shardwright"):
            continue
        yield from inspect.get_annotations(cls).items()
        for name, own in vars(cls).items():
            function = getattr(own, "fget", None) or getattr(own, "__func__", own)
            if inspect.isfunction(function):
                yield from ((name, str(told)) for told in function.__annotations__.values())


def hidden_in(value: Any, classes: set[str]) -> list[tuple[str, str]]:
    """Public attributes and methods of a class, or a function, that speak of a class without a public name."""
    return [
        (name, word)
        for name, told in _spoken_by(value)
        if name == "__init__" or not name.startswith("_")
        for word in re.findall(r"\w+", told)
        if word in classes and word not in sw.__all__
    ]
