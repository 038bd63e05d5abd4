"""Settings of a table whose ids are hashed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from attrs import field, frozen

import shardwright as sw

KEY = "hash_embedding"
"""Where the settings stand in ``extras``, of constraints and of a plan's table."""

LRU, LFU = "lru", "lfu"


def _known(instance: Any, attribute: Any, value: Any) -> None:
    if value not in (LRU, LFU):
        raise sw.InvalidInputError(f"evict must be {LRU!r} or {LFU!r}, got {value!r}")


def _positive(instance: Any, attribute: Any, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise sw.InvalidInputError(f"min_sightings must be a number from 1, got {value!r}")


@frozen
class HashSettings:
    """Rules of births and evictions of rows.

    Args:
        evict: ``"lru"``, the row that was not looked up for longest, or ``"lfu"``, the one looked up least often.
        min_sightings: number of times that an id must be seen, in training, before it gets a row.

    Raises:
        InvalidInputError: a value is another.
    """

    evict: str = field(default=LRU, validator=_known)
    min_sightings: int = field(default=1, validator=_positive)

    def constraints(self, **others: Any) -> sw.ParameterConstraints:
        """The constraints of a table whose ids are keys: no other sharding type takes such.

        Args:
            others: further fields of :class:`shardwright.ParameterConstraints`.
        """
        return sw.ParameterConstraints(sharding_types=["hash_rows"], extras=self.to_extras(), **others)

    def to_extras(self) -> Mapping[str, Any]:
        """Write as JSON data for ``extras``."""
        return {KEY: attrs.asdict(self)}

    @classmethod
    def from_extras(cls, extras: Mapping[str, Any]) -> HashSettings | None:
        """Read the data of :meth:`to_extras`; ``None`` if there is none.

        Raises:
            InvalidInputError: the data is of another form.
        """
        if KEY not in extras:
            return None
        try:
            return cls(**extras[KEY])
        except TypeError as error:
            raise sw.InvalidInputError(f"extras[{KEY!r}]: {error}") from error

    @classmethod
    def of(cls, request: sw.KernelRequest) -> HashSettings:
        """The settings of a request to a kernel; the default ones if it has none.

        Raises:
            InvalidInputError: the data is of another form.
        """
        return cls.from_extras(request.extras) or cls()
