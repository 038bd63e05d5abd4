"""The optimizer of a table, as data: known when planning, given to the kernel when building."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from attrs import field, frozen

from shardwright.arguments import (
    NonNegativeFloat,
    PositiveFloat,
    Within,
    brief,
    check,
    not_empty,
    real,
    typed,
)
from shardwright.errors import InvalidInputError, UnknownNameError, nearest
from shardwright.planning.tables.caching import FUSED_PARAMS as CACHE_PARAMS

_PUBLISHED = frozenset({"adagrad", "adam", "row_wise_adagrad", "sgd"})
"""Optimizers whose parameters are checked here; those of others are by their plugins, when a kernel is asked."""

_DEFAULT = "sgd"
"""The optimizer of tables that name none, at a learning rate of 0.01: FBGEMM's default, and so TorchRec's."""

_RENAMED = {"lr": "learning_rate"}

CLIPPING_PARAMS = frozenset({"gradient_clipping", "max_gradient"})
"""The keys of ``fused_params`` that are about the gradients of outputs, not the optimizer."""

_MAX_GRADIENT = 1.0  # where gradient_clipping=True alone is given, as in FBGEMM
_ELSEWHERE = CACHE_PARAMS | CLIPPING_PARAMS


def max_gradient_of(fused_params: Mapping[str, Any] | None) -> float | None:
    """The largest element, in absolute value, that ``fused_params`` allow gradients of outputs; ``None``: any.

    ``max_gradient`` alone asks for clipping, without ``gradient_clipping=True`` too.

    Raises:
        InvalidInputError: a value is of the wrong form.
    """
    given = fused_params or {}
    is_asked = given.get("gradient_clipping", "max_gradient" in given)
    check("gradient_clipping", is_asked, bool)
    value = given.get("max_gradient", _MAX_GRADIENT)
    check("max_gradient", value, PositiveFloat)
    return float(value) if is_asked else None


BelowOne = Annotated[float, Within(ge=0, lt=1)]
_KNOWN: Mapping[str, Any] = {
    "eps": NonNegativeFloat,
    "beta1": BelowOne,
    "beta2": BelowOne,
    "weight_decay": NonNegativeFloat,
    "momentum": BelowOne,
    "initial_accumulator_value": NonNegativeFloat,
    "stochastic_rounding": bool,
    "weight_decay_mode": str,
}
"""Parameters of the optimizers above; each plugin knows which of them its optimizer takes."""
_PLAIN = float | str | bool | None | tuple[float | str | bool | None, ...]


def _canonical(name: str) -> str:
    return name.lower() if isinstance(name, str) else name


def _items(values: Mapping[str, Any] | tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    plain = {name: _as_plain(value) for name, value in dict(values).items()}
    check("parameters", plain, Mapping[str, Any])
    return tuple(sorted(plain.items()))


def _as_plain(value: Any) -> Any:
    """A value that can be hashed and written: numbers of NumPy and torch become Python's, lists tuples."""
    if getattr(value, "ndim", None) == 0:
        return value.item()
    return tuple(value) if isinstance(value, list) else value


def _known_parameters(instance: Any, attribute: Any, values: tuple[tuple[str, Any], ...]) -> None:
    """Parameters of the optimizers known here are known and within range; those of others are plain data."""
    for name, value in values:
        if instance.name in _PUBLISHED and name not in _KNOWN:
            known = ["optimizer", "learning_rate", *_KNOWN, *sorted(_ELSEWHERE)]
            raise UnknownNameError(
                f"optimizer {instance.name!r} has no parameter {name!r}. Known: {', '.join(known)}."
                f"{nearest(name, known)}"
            )
        hint = _KNOWN[name] if instance.name in _PUBLISHED else _PLAIN
        check(f"{name} of optimizer {instance.name!r}", value, hint)


@frozen(field_transformer=typed)
class OptimizerSpec:
    """An optimizer by name, its learning rate and its other parameters; hashable.

    Names are open: a kernel declares which it can run. The built-in ones are ``sgd``, ``adagrad``,
    ``row_wise_adagrad`` and ``adam`` (rows that get no gradient in a step are left alone by all of them).

    Args:
        name: the optimizer's name.
        learning_rate: the initial learning rate; 0.01 by default.
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

    name: str = field(default=_DEFAULT, converter=_canonical, validator=not_empty)
    learning_rate: NonNegativeFloat = field(default=0.01, converter=real)
    parameters: tuple[tuple[str, Any], ...] = field(default=(), converter=_items, validator=_known_parameters)
    is_assumed: bool = False

    @classmethod
    def from_fused_params(cls, fused_params: Mapping[str, Any] | None) -> OptimizerSpec:
        """The optimizer that ``fused_params`` describe; SGD at 0.01 where they name none.

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
