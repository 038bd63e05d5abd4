"""JSON from a file or a text, within the limits of a document's size and nesting."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardwright.planning.documents.limits import MOST_DOCUMENT_BYTES, MOST_NESTING


class MalformedError(Exception):
    """A text that is no JSON, or exceeds a limit; says what is wrong, to follow the document's name."""


def read_text(path: Path) -> str:
    """The text in a file.

    Raises:
        MalformedError: it cannot be read, is no text, or is too long.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_DOCUMENT_BYTES + 1)
    except OSError as error:
        raise MalformedError(f"cannot be read: {error.strerror}") from error
    _check_length(len(data))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MalformedError(f"is no text in UTF-8: {error.reason} at byte {error.start}") from error


def parse_json(text: str) -> Any:
    """The JSON value in a text.

    Raises:
        MalformedError: it is no JSON, an object has a key twice, a number is not finite, or it exceeds a limit.
    """
    _check_length(len(text))
    try:
        value = json.loads(
            text, object_pairs_hook=_without_repetition, parse_float=_finite, parse_constant=_finite
        )
    except json.JSONDecodeError as error:
        raise MalformedError(
            f"is no JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:  # Python reads no integers of thousands of digits
        raise MalformedError(f"is not read: {error}") from error
    _check_nesting(value)
    return value


def _check_length(length: int) -> None:
    if length > MOST_DOCUMENT_BYTES:
        raise MalformedError(f"is longer than {MOST_DOCUMENT_BYTES} bytes, the most that is read")


def _too_deep() -> MalformedError:
    return MalformedError(
        f"is nested too deeply; {MOST_NESTING} lists and objects inside each other are the most"
    )


def _check_nesting(value: Any) -> None:
    """Walk level by level, since a deep value is what a recursion could not walk."""
    level = [value]
    for _ in range(MOST_NESTING + 1):
        level = [one for one in level if isinstance(one, dict | list)]
        if not level:
            return
        inner: list[Any] = []
        for one in level:
            inner += one.values() if isinstance(one, dict) else one
        level = inner
    raise _too_deep()


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        shown = number if len(number) < 20 else f"{number[:20]}..."
        raise MalformedError(f"has the number {shown}, which is not finite")
    return value


def _without_repetition(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    pairs = list(pairs)
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    raise MalformedError(f"has the key {repeated[0]!r} twice in one object; put both values into one")
