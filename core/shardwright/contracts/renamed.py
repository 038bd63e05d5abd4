"""Attributes of contracts under the names that they had before, for plugins that still give or read those."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

_OF_OLD_NAME = "_shardwright_old_names"
"""The attribute of a class that says which of its attributes it gave under their old names."""


def warn_renamed(owner: str, old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn that an attribute has another name now."""
    warnings.warn(f"{owner}.{old} is called {new} now", DeprecationWarning, stacklevel=stacklevel)


class _OldName:
    """An attribute under its old name: read, and set on an instance."""

    def __init__(self, owner: type, old: str, new: str) -> None:
        self._owner, self._old, self._new = owner, old, new

    def __get__(self, instance: Any, owner: type) -> Any:
        warn_renamed(owner.__name__, self._old, self._new)
        holder = next((base for base in owner.__mro__ if self._new in vars(base)), owner)
        # A method that was given under the old name asks its base for the same.
        source = super(holder, owner if instance is None else instance) if self._is_of(holder) else instance
        return getattr(owner if source is None else source, self._new)

    def __set__(self, instance: Any, value: Any) -> None:
        warn_renamed(type(instance).__name__, self._old, self._new)
        setattr(instance, self._new, value)

    def _is_of(self, holder: type) -> bool:
        return self._new in vars(holder).get(_OF_OLD_NAME, ())


class Renamed:
    """A contract some of whose attributes were renamed: a subclass may still give them under their old names."""

    _renamed: ClassVar[Mapping[str, str]] = {}
    """Old name -> new name."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "_renamed" in vars(cls):
            for old, new in cls._renamed.items():
                setattr(cls, old, _OldName(cls, old, new))
            return
        given = {old: new for old, new in cls._renamed.items() if old in vars(cls) and new not in vars(cls)}
        for old, new in given.items():
            warn_renamed(cls.__name__, old, new, stacklevel=4)  # past ABCMeta
            setattr(cls, new, vars(cls)[old])
        setattr(cls, _OF_OLD_NAME, frozenset(given.values()))
