"""JSON from a file or a text, within the limits of a document's size and nesting."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from shardwright.planning.documents.limits import MOST_DOCUMENT_BYTES, MOST_NESTING

_TOO_DEEP = f"is nested too deeply; {MOST_NESTING} lists and objects inside each other are the most"


class MalformedError(Exception):
    """A text that is no JSON, or exceeds a limit; says what is wrong, to follow the document's name."""


def read_text(path: str | Path) -> str:
    """The text in a file.

    Raises:
        MalformedError: it cannot be read, is no text, or is too long.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MOST_DOCUMENT_BYTES + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise MalformedError(f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise MalformedError(f"is no text in UTF-8: {error.reason} at byte {error.start}") from error
    if len(data) > MOST_DOCUMENT_BYTES:
        raise MalformedError(_too_long())
    return text


def parse_json(text: str) -> Any:
    """The JSON value in a text.

    Raises:
        MalformedError: it is no JSON, an object has a key twice, a number is not finite, or it exceeds a limit.
    """
    if len(text) > MOST_DOCUMENT_BYTES:
        raise MalformedError(_too_long())
    try:
        value = json.loads(
            text, object_pairs_hook=_without_repetition, parse_float=_finite, parse_constant=_finite
        )
    except json.JSONDecodeError as error:
        raise MalformedError(
            f"is no JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    except RecursionError as error:
        raise MalformedError(_TOO_DEEP) from error
    except ValueError as error:  # Python reads no integers of thousands of digits
        raise MalformedError(f"is not read: {error}") from error
    _check_nesting([value], MOST_NESTING)
    return value


def _check_nesting(values: Any, levels_left: int) -> None:
    for value in values:
        if isinstance(value, dict | list):
            if not levels_left:
                raise MalformedError(_TOO_DEEP)
            _check_nesting(value.values() if isinstance(value, dict) else value, levels_left - 1)


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise MalformedError(f"has the number {number:.20}, which is not finite")
    return value


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        (repeated, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise MalformedError(f"has the key {repeated!r} twice in one object; put both values into one")
    return made


def _too_long() -> str:
    return f"is longer than {MOST_DOCUMENT_BYTES} bytes, the most that is read"
