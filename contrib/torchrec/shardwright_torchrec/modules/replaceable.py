"""Configurations that `dataclasses.replace` takes, as it takes TorchRec's."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import attrs

_T = TypeVar("_T", bound=type)


def replaceable(cls: _T) -> _T:
    """Let `dataclasses.replace`, `fields` and `asdict` take an attrs class; what they make is checked as any."""
    template: Any = dataclasses.make_dataclass(
        cls.__name__,
        [(own.name, Any, dataclasses.field(default=None, init=own.init)) for own in attrs.fields(cls)],
    )
    cls.__dataclass_fields__ = template.__dataclass_fields__  # type: ignore[attr-defined]  # what makes a dataclass
    return cls
