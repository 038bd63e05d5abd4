"""Settings of a table whose ids are hashed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
from attrs import field, frozen

import shardwright as sw
from shardwright.contracts import NO_COLUMNS, WEIGHTS
from shardwright.host.extensions import load_at

if TYPE_CHECKING:
    from torch import Tensor

KEY = "hash_embedding"
"""Where the settings stand in ``extras``, of constraints and of a plan's table."""

STATE = ("row_keys", "row_uses", "row_last_use")
"""The names of what the index knows of each row."""

Score: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
"""A function of the uses of rows and the steps of their last uses, int64 ``[n]`` each, of some rows, that returns their
scores. The lowest is evicted first; of equal ones the row that was not used for longest."""

NEVER = "never"
"""No row makes room for another id. Of a checkpoint with more ids than rows, those that were not used for longest are
left out."""

SCORES: Mapping[str, Score] = {
    "lru": lambda uses, last_use: last_use,
    "lfu": lambda uses, last_use: uses,
    NEVER: lambda uses, last_use: last_use,
}


def _known(instance: HashSettings, attribute: Any, value: Any) -> None:
    if not isinstance(value, str):
        raise sw.InvalidInputError(f"evict must be the name of an eviction, got {value!r}")
    instance.score()


def _name(instance: Any, attribute: Any, value: Any) -> None:
    taken = (WEIGHTS, *NO_COLUMNS[1:])  # empty: there is no such column
    if not isinstance(value, str) or value in taken:
        raise sw.InvalidInputError(
            f"count_column must be the name of a column of ids, got {value!r}; no column of counts is called "
            f"{' or '.join(taken)}"
        )


def _number(instance: Any, attribute: Any, value: Any) -> None:
    least = attribute.default
    if type(value) is not int or value < least:
        raise sw.InvalidInputError(f"{attribute.name} must be a whole number from {least}, got {value!r}")


@frozen
class HashSettings:
    """Rules of births and evictions of rows.

    Args:
        evict: ``"lru"``, the row that was not looked up for longest; ``"lfu"``, the one looked up least often;
            ``"never"``: no row makes room, so that new ids of a full table get none; or the word of an extension at the
            point ``eviction``, which loads a :data:`Score`.
        min_sightings: number of times that an id must be seen, in training, before it gets a row.
        count_column: name of the int64 column of a batch that says how often each id was seen; empty if once.
        steps_to_live: number of steps after which a row that was not looked up is given up, be the table full or
            not, whatever ``evict`` says; up to an eighth more may pass. 0 if it is kept.

    Raises:
        InvalidInputError: a value is another.
        UnknownPluginError: no plugin has such an eviction.
    """

    evict: str = field(default="lru", validator=_known)
    min_sightings: int = field(default=1, validator=_number)
    count_column: str = field(default="", validator=_name)
    steps_to_live: int = field(default=0, validator=_number)

    def score(self) -> Score:
        """The function that says which rows are evicted first."""
        return SCORES.get(self.evict) or load_at("eviction", self.evict, sw.host.host().extensions, SCORES)

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
