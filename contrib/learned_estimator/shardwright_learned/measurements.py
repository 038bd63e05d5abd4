"""Measurements: shards with their features, and the time of each phase of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

import shardwright as sw
from shardwright_learned.features import FEATURES


def _finite(instance: Any, attribute: Any, value: Mapping[str, float]) -> None:
    wrong = {
        name: number
        for name, number in value.items()
        if type(number) not in (int, float) or not math.isfinite(number) or number < 0
    }
    if wrong or not value:
        raise sw.InvalidInputError(
            f"a measurement's {attribute.name} must be numbers, finite and not negative; got {wrong or 'none'}"
        )


@attrs.frozen
class Measurement:
    """One shard, measured.

    Attributes:
        compute_kernel: the name of its kernel.
        sharding_type: the name of its sharding type.
        features: feature -> value, those of `FEATURES`.
        milliseconds: phase of a step -> how long it took.

    Raises:
        InvalidInputError: features are missing or unknown, or a number is negative or not finite.
    """

    compute_kernel: str
    sharding_type: str
    features: Mapping[str, float] = attrs.field(validator=_finite)
    milliseconds: Mapping[str, float] = attrs.field(validator=_finite)

    @features.validator
    def _complete(self, attribute: Any, value: Mapping[str, float]) -> None:
        if set(value) != set(FEATURES):
            raise sw.InvalidInputError(
                f"a measurement has the features {sorted(value)}; this version fits {sorted(FEATURES)}: measure again"
            )

    @classmethod
    def from_data(cls, data: Any) -> Measurement:
        """A measurement from JSON data.

        Raises:
            InvalidInputError: The data is not of that form.
        """
        names = {field.name for field in attrs.fields(cls)}
        if not isinstance(data, dict) or set(data) != names:
            raise sw.InvalidInputError(
                f"a measurement is an object with {', '.join(sorted(names))}; got {data!r}"
            )
        return cls(**data)
