"""Numbers and JSON for people to read."""

from __future__ import annotations

import json
import math
from typing import Any

from shardwright.arguments import brief
from shardwright.errors import InvalidInputError

_LINE = 100

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_text(size: float) -> str:
    """``59.6 GiB``."""
    value, unit = float(size), 0
    while abs(value) >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{int(value)} B"


def count_text(count: int, noun: str) -> str:
    """``1 rank``, ``16 ranks``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def number_text(value: float) -> str:
    """Four digits, or a whole number: ``0.1234``, ``217.8``, ``12,860``."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def percent_at_most(part: float) -> str:
    """``0.1 %``: two digits, rounded up, so that it is no less than the part."""
    percent = 100 * part
    step = 10.0 ** (math.floor(math.log10(percent)) - 1) if percent > 0 else 1.0
    return f"{math.ceil(round(percent / step, 9)) * step:.12g} %"


def plain_json(value: Any) -> str:
    """JSON on one line; numbers of NumPy are written as Python's.

    Raises:
        InvalidInputError: there is something in it that is no JSON data, or a number that is not finite.
    """
    try:
        return json.dumps(value, allow_nan=False, default=_python_number)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"a plan document holds JSON data, not {brief(value)}: {error}") from error


def _python_number(value: Any) -> Any:
    if getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"{brief(value)} is no JSON data")


def json_text(value: Any, indent: str = "") -> str:
    """JSON with each object or list on one line where it fits and holds no other object, indented elsewhere."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not items:
        return plain_json(value)
    if len(items) <= _LINE and not _holds_objects(items):
        flat = plain_json(value)
        if len(indent) + len(flat) <= _LINE:
            return flat
    deeper = indent + " "
    if isinstance(value, dict):
        lines = [f"{deeper}{json.dumps(key)}: {json_text(item, deeper)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    return "[\n" + ",\n".join(deeper + json_text(item, deeper) for item in value) + f"\n{indent}]"


def _holds_objects(items: Any) -> bool:
    return any(isinstance(item, dict) or (isinstance(item, list) and _holds_objects(item)) for item in items)
