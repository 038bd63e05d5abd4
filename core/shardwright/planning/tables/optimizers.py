"""The optimizer of a table, as data: known when planning, given to the kernel when building."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from shardwright.arguments import brief, typed
from shardwright.errors import InvalidInputError, UnknownNameError, nearest
from shardwright.planning.tables.caching import FUSED_PARAMS as CACHE_PARAMS

_PUBLISHED = frozenset({"adagrad", "adam", "row_wise_adagrad", "sgd"})
"""Optimizers whose parameters are checked here; those of others are by their plugins, when a kernel is asked."""

_DEFAULT = "sgd"
"""FBGEMM's default optimizer, at a learning rate of 0.01."""

_RENAMED = {"lr": "learning_rate"}

CLIPPING_PARAMS = frozenset({"gradient_clipping", "max_gradient"})
"""The keys of ``fused_params`` that are about the gradients of outputs, not the optimizer."""

_MAX_GRADIENT = 1.0  # FBGEMM's default where gradient_clipping=True alone is given
_ELSEWHERE = CACHE_PARAMS | CLIPPING_PARAMS


def check_max_gradient(value: Any) -> None:
    """Check the largest element that a gradient may have.

    Raises:
        InvalidInputError: it is no number above 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InvalidInputError(f"max_gradient must be a finite number above 0, got {brief(value)}")


def max_gradient_of(fused_params: Mapping[str, Any] | None) -> float | None:
    """The largest element, in absolute value, that ``fused_params`` allow gradients of outputs; ``None``: any.

    ``max_gradient`` alone asks for clipping. FBGEMM would ignore it without ``gradient_clipping=True``.

    Raises:
        InvalidInputError: a value is of the wrong form.
    """
    given = fused_params or {}
    is_asked = given.get("gradient_clipping", "max_gradient" in given)
    if not isinstance(is_asked, bool):
        raise InvalidInputError(f"gradient_clipping must be true or false, got {brief(is_asked)}")
    value = given.get("max_gradient", _MAX_GRADIENT)
    check_max_gradient(value)
    return float(value) if is_asked else None


# What the optimizers above understand, or take no notice of, as FBGEMM does; from 0, up to but not including the limit.
_LIMITS: Mapping[str, float] = {
    "eps": math.inf,
    "beta1": 1.0,
    "beta2": 1.0,
    "weight_decay": math.inf,
    "momentum": 1.0,
    "initial_accumulator_value": math.inf,
}
# Those that are no numbers. Which optimizer takes which of all, and in which values, its plugin knows.
_SWITCHES = frozenset({"stochastic_rounding"})
_MODES = frozenset({"weight_decay_mode"})


def _number(value: Any) -> float:
    if isinstance(value, str | bool):
        raise InvalidInputError(f"learning_rate must be a number, got {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidInputError(f"learning_rate must be a number, got {brief(value)}") from None


def _rate(instance: Any, attribute: Any, value: Any) -> None:
    if not 0 <= value < math.inf:
        must = "be finite" if value == math.inf else "not be negative"
        raise InvalidInputError(f"learning_rate must {must}, got {value!r}")


def _canonical(name: Any) -> Any:
    return name.lower() if isinstance(name, str) else name


def _named(instance: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise InvalidInputError(f"the name of an optimizer must be a text, got {brief(value)}")


def _items(values: Mapping[str, Any] | tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    pairs = values.items() if isinstance(values, Mapping) else values
    plain = {name: _as_plain(value) for name, value in pairs}
    for name in plain:
        if not isinstance(name, str):
            raise InvalidInputError(f"parameters must have texts for names, got {brief(name)}")
    return tuple(sorted(plain.items()))


def _as_plain(value: Any) -> Any:
    """A value that can be hashed and written: numbers of NumPy and torch become Python's, lists tuples."""
    if getattr(value, "ndim", None) == 0:
        return value.item()
    return tuple(value) if isinstance(value, list) else value


def _known_parameters(instance: Any, attribute: Any, values: tuple[tuple[str, Any], ...]) -> None:
    """Parameters of the optimizers known here are known and within range; those of others are plain data."""
    for name, value in values:
        if instance.name in _PUBLISHED:
            _check_known(instance.name, name, value)
        elif not _is_plain(value):
            raise InvalidInputError(
                f"parameters of an optimizer are numbers, texts or lists of them; {name!r} of {instance.name!r} is "
                f"{brief(value)}"
            )


def _check_known(optimizer: str, name: str, value: Any) -> None:
    known = ["optimizer", "learning_rate", *_LIMITS, *sorted(_SWITCHES | _MODES | _ELSEWHERE)]
    if name in _MODES and isinstance(value, str):
        return
    if name in _SWITCHES:
        if not isinstance(value, bool):
            raise InvalidInputError(
                f"{name} of optimizer {optimizer!r} must be true or false, got {brief(value)}"
            )
        return
    if name not in _LIMITS:
        raise UnknownNameError(
            f"optimizer {optimizer!r} has no parameter {name!r}. Known: {', '.join(known)}.{nearest(name, known)}"
        )
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _LIMITS[name]:
        below = " below 1" if _LIMITS[name] == 1 else ""
        raise InvalidInputError(
            f"{name} of optimizer {optimizer!r} must be a finite number from 0{below}, got {brief(value)}"
        )


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | bool | int | float)


@frozen(field_transformer=typed)
class OptimizerSpec:
    """An optimizer by name, its learning rate and its other parameters; hashable.

    Names are open: a kernel declares which it can run. The built-in ones are ``sgd``, ``adagrad``,
    ``row_wise_adagrad`` and ``adam`` (rows that get no gradient in a step are left alone by all of them).

    Args:
        name: the optimizer's name.
        learning_rate: the initial learning rate; 0.01 as in FBGEMM.
        parameters: the rest (``eps``, ``beta1``, ``beta2``, ``weight_decay``, ``stochastic_rounding``, ...), sorted by
            name. Kernels say which they can run.
        is_assumed: it was not asked for: it is the default, or a script's own, whose state plans are to count. A kernel
            that leaves the update to the script then need not run it.

    Raises:
        InvalidInputError: a value is of the wrong form or out of range.
        UnknownNameError: a built-in optimizer has no such parameter; the text has the nearest.

    Example:
        >>> import shardwright as sw
        >>> sw.OptimizerSpec("adam", learning_rate=0.1, parameters={"eps": 1e-6}).parameters
        (('eps', 1e-06),)
    """

    name: str = field(default=_DEFAULT, converter=_canonical, validator=_named)
    learning_rate: float = field(default=0.01, converter=_number, validator=_rate)
    parameters: tuple[tuple[str, Any], ...] = field(default=(), converter=_items, validator=_known_parameters)
    is_assumed: bool = False

    @classmethod
    def from_fused_params(cls, fused_params: Mapping[str, Any] | None) -> OptimizerSpec:
        """The optimizer that ``fused_params`` describe; SGD at 0.01 where they name none, as in FBGEMM.

        Args:
            fused_params: ``{"optimizer": name, "learning_rate": ..., "eps": ..., ...}``; what is in it
                about a cache is left to :class:`~shardwright.planning.tables.caching.CacheParams`, and what is about
                clipping to :func:`max_gradient_of`.

        Raises:
            InvalidInputError: the optimizer is no name, or a value is out of range.
            UnknownNameError: a built-in optimizer has no such parameter; the text has the nearest.
        """
        values = {
            _RENAMED.get(name, name): value
            for name, value in (fused_params or {}).items()
            if name not in _ELSEWHERE
        }
        if len(values) < sum(name not in _ELSEWHERE for name in fused_params or {}):
            raise InvalidInputError(
                f"fused_params have lr and learning_rate, which are one: {brief(fused_params)}"
            )
        if not values:
            return ASSUMED
        optimizer = values.pop("optimizer", _DEFAULT)
        if not isinstance(optimizer, str) or not optimizer:
            raise InvalidInputError(
                f"fused_params['optimizer'] must be a name such as 'sgd', got {brief(optimizer)}"
            )
        rate = values.pop("learning_rate", 0.01)
        return cls(name=optimizer, learning_rate=rate, parameters=values)

    def get(self, parameter: str, default: Any) -> Any:
        """The value of ``parameter``, or ``default`` if it was not given."""
        return dict(self.parameters).get(parameter, default)

    @property
    def adds_up(self) -> bool:
        """True if updates by two gradients, one after the other, equal one by their sum."""
        return self.name == _DEFAULT and not any(value for _, value in self.parameters)

    def __str__(self) -> str:
        """``row_wise_adagrad(learning_rate=0.02, eps=1e-08)``."""
        pairs = [("learning_rate", self.learning_rate), *self.parameters]
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in pairs)})"


ASSUMED = OptimizerSpec(is_assumed=True)
"""Optimizer of tables for which nobody named one."""

STILL = OptimizerSpec(learning_rate=0.0)
"""Optimizer of tables that are never updated: it has no state, and is never run."""
