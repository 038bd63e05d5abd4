"""The keys of ``fused_params`` that TorchRec passes to FBGEMM beside the optimizer's: served, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from shardwright.arguments import brief
from shardwright.errors import InvalidInputError, UnsupportedError

# FBGEMM's BoundsCheckMode, by name and by value, and the level of checks that does what it says.
_LEVELS: Final[Mapping[str, str]] = {
    "fatal": "standard",
    "warning": "warning",
    "ignore": "ignore",
    "none": "off",
}
_MODES = tuple(_LEVELS)
_FLOAT32 = ("FP32", "FLOAT32", "TORCH.FLOAT32")


def input_checks_of(bounds_check_mode: Any) -> str | None:
    """The level of checks that FBGEMM's mode stands for; ``None`` if no mode was given.

    Args:
        bounds_check_mode: ``BoundsCheckMode.FATAL``, ``WARNING``, ``IGNORE`` or ``NONE``, its name or value.

    Raises:
        InvalidInputError: there is no such mode.
    """
    if bounds_check_mode is None:
        return None
    given = getattr(bounds_check_mode, "name", bounds_check_mode)
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < len(_MODES):
        given = _MODES[given]
    name = str(given).lower().removeprefix("v2_")  # the second version of FBGEMM's kernel checks the same
    if name not in _LEVELS:
        raise InvalidInputError(
            f"bounds_check_mode must be one of {', '.join(map(str.upper, _MODES))}, got {brief(bounds_check_mode)}"
        )
    return _LEVELS[name]


def check_output_dtype(value: Any) -> None:
    """Check that results are asked for as they are made: as float32.

    Raises:
        UnsupportedError: they are not.
    """
    if str(getattr(value, "value", value)).upper() not in _FLOAT32:
        raise UnsupportedError(
            f"output_dtype is {brief(value)}: lookups give float32. To send results in half the bytes, give a codec: "
            "qcomm_codecs_registry=QCommsConfig(forward_precision='fp16'); to go on in another type, convert the output"
        )


def _check_switch(value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidInputError(f"prefetch_pipeline must be true or false, got {brief(value)}")


def _only_default(name: str, reason: str) -> Callable[[Any], None]:
    """A check that a key says nothing but FBGEMM's default."""

    def check(value: Any) -> None:
        if value:
            raise UnsupportedError(f"{name} is {brief(value)}: {reason}")

    return check


_SIZE = "the cache holds the part of a table's rows that cache_load_factor says; give that instead"
_CHECKS: Final[Mapping[str, Callable[[Any], object]]] = {
    "bounds_check_mode": input_checks_of,
    "output_dtype": check_output_dtype,
    # Pipelines that fetch rows ahead do so where a kernel has any to fetch, whether it was told or not.
    "prefetch_pipeline": _check_switch,
    "cache_reserved_memory": _only_default("cache_reserved_memory", _SIZE),
    "cache_sets": _only_default("cache_sets", _SIZE),
    "cache_precision": _only_default(
        "cache_precision",
        "rows in the cache have the table's own data_type; leave it out, and give the table another one if wanted",
    ),
    "enforce_hbm": _only_default(
        "enforce_hbm",
        "optimizer states lie where the compute kernel keeps them; name another in constraints' compute_kernels",
    ),
}

FBGEMM_PARAMS = frozenset(_CHECKS)
"""The keys of ``fused_params`` that are neither the optimizer's nor the cache's own."""


def check_fbgemm_params(fused_params: Mapping[str, Any] | None) -> None:
    """Check what ``fused_params`` say beside optimizer and cache.

    Raises:
        InvalidInputError: a value is of the wrong form.
        UnsupportedError: a value asks for something that there is not; the text says what there is.
    """
    for name, value in (fused_params or {}).items():
        if name in _CHECKS and value is not None:
            try:
                _CHECKS[name](value)
            except (InvalidInputError, UnsupportedError) as error:
                raise type(error)(f"fused_params[{name!r}]: {error}") from None
