"""The optimizer of a table, as data: known when planning, given to the kernel when building."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from attrs import field, frozen

from shardwright.errors import InvalidInputError
from shardwright.planning.caching import FUSED_PARAMS as CACHE_PARAMS

# FBGEMM's EmbOptimType values and the common spellings, to the one name kernels declare.
_ALIASES = {
    "sgd": "sgd",
    "exact_sgd": "sgd",
    "adagrad": "adagrad",
    "exact_adagrad": "adagrad",
    "row_wise_adagrad": "row_wise_adagrad",
    "rowwise_adagrad": "row_wise_adagrad",
    "exact_row_wise_adagrad": "row_wise_adagrad",
    "exact_rowwise_adagrad": "row_wise_adagrad",
    "adam": "adam",
}

_RENAMED = {"lr": "learning_rate"}


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InvalidInputError(f"learning_rate must be a number, got {value!r}") from None


def _rate(instance: Any, attribute: Any, value: Any) -> None:
    if not value >= 0:
        raise InvalidInputError(f"learning_rate must not be negative, got {value!r}")


def _canonical(name: str) -> str:
    return _ALIASES.get(str(name).lower(), str(name).lower())


def _items(values: Mapping[str, Any] | tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    pairs = values.items() if isinstance(values, Mapping) else values
    # A specification is hashed: lists (betas) become tuples.
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in pairs}
    return tuple(sorted(plain.items()))


@frozen
class OptimizerSpec:
    """An optimizer by name, its learning rate and its other parameters; hashable.

    Names are open: a kernel declares which it can run. The built-in ones are ``sgd``, ``adagrad``,
    ``row_wise_adagrad`` and ``adam`` (rows that get no gradient in a step are left alone by all of them).

    Args:
        name: the optimizer's name; FBGEMM's ``EmbOptimType`` values are understood as well.
        learning_rate: the initial learning rate; 0.01 as in FBGEMM.
        parameters: the rest (``eps``, ``beta1``, ``beta2``, ``weight_decay``, ...), sorted by name.
    """

    name: str = field(default="sgd", converter=_canonical)
    learning_rate: float = field(default=0.01, converter=_number, validator=_rate)
    parameters: tuple[tuple[str, Any], ...] = field(default=(), converter=_items)

    @classmethod
    def from_fused_params(cls, fused_params: Mapping[str, Any] | None) -> OptimizerSpec:
        """The optimizer that ``fused_params`` describe; SGD at 0.01 where they name none, as in FBGEMM.

        Args:
            fused_params: ``{"optimizer": name or EmbOptimType, "learning_rate": ..., "eps": ..., ...}``; what is in it
                about a cache is left to :class:`~shardwright.planning.caching.CacheParams`.

        Raises:
            InvalidInputError: the optimizer is neither a name nor an enum member with a string value.
        """
        values = {
            _RENAMED.get(name, name): value
            for name, value in (fused_params or {}).items()
            if name not in CACHE_PARAMS
        }
        optimizer = values.pop("optimizer", "sgd")
        name = optimizer.value if isinstance(optimizer, Enum) else optimizer
        if not isinstance(name, str):
            raise InvalidInputError(
                f"fused_params['optimizer'] must be a name such as 'sgd' or an EmbOptimType, got {optimizer!r}"
            )
        rate = values.pop("learning_rate", 0.01)
        return cls(name=name, learning_rate=rate, parameters=values)

    def get(self, parameter: str, default: Any) -> Any:
        """The value of ``parameter``, or ``default`` if it was not given."""
        return dict(self.parameters).get(parameter, default)

    def __str__(self) -> str:
        """``row_wise_adagrad(learning_rate=0.02, eps=1e-08)``."""
        pairs = [("learning_rate", self.learning_rate), *self.parameters]
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in pairs)})"
