"""Documents and arguments changed by chance into what nobody would write, the same for the same seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_HUGE = 10**400
_DIGITS = "9" * 5000
_NESTED = "[" * 900 + "]" * 900

# What stands in place of a value; texts that begin with "json:" are put into the document as they are.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 0.5, -0.5, 1e-320, 1.0, 3.0, 1e308, -1e308),
    *(
        512,
        4096,
        65_535,
        65_536,
        10**6,
        10**8,
        10**9,
        1 << 31,
        (1 << 63) - 1,
        1 << 63,
        1 << 65,
        -(1 << 63),
        _HUGE,
    ),
    *("", "x", "nan", "Infinity", "\0", "\x1b[31m", "[/red]", "[bold]x", "../..", "ü" * 50, "x" * 5000, "*"),
    *(
        [],
        {},
        [[]],
        [0],
        [None],
        {"": {}},
        {"name": []},
        {"value": {}},
        [1, 2],
        ["a", "a"],
        {"name": "range"},
    ),
    *(list(range(2000)), {str(number): number for number in range(500)}),
    *(f"json:{_DIGITS}", f"json:{_NESTED}", "json:NaN", "json:-Infinity", "json:1e999"),
)
_GARBAGE = (
    "",
    "\0",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"',
    "\\",
    "nan",
    "\ufeff",
    "é",
    " ",
    "1e5",
    "null",
    "[" * 300,
)


def mutated(document: Any, chance: random.Random) -> bytes:
    """A document with a few changes: of its values, its keys, or its text."""
    data = json.loads(json.dumps(document))
    for _ in range(chance.choice((1, 1, 1, 2, 3, 5))):
        data = _changed(data, chance)
    text = _written(data)
    if chance.random() < 0.15:
        text = _garbled(text, chance)
    encoded = text.encode("utf-8", "surrogatepass")
    if chance.random() < 0.03:
        at = chance.randrange(len(encoded) + 1)
        encoded = encoded[:at] + bytes(chance.choices(range(256), k=3)) + encoded[at:]
    return encoded


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value[:50])
    for key, item in items:
        if len(place) < 30:
            yield from _places(item, (*place, key))


def _at(value: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        value = value[key]
    return value


def _changed(data: Any, chance: random.Random) -> Any:
    """One change at a place of its own."""
    places = list(_places(data))
    place = chance.choice(places)
    if not place:
        return _any(chance) if chance.random() < 0.2 else data
    holder, key = _at(data, place[:-1]), place[-1]
    change: Callable[[], None] = chance.choice(
        (
            *[lambda: holder.__setitem__(key, _any(chance))] * 5,
            *[lambda: holder.__setitem__(key, _near(holder[key], chance))] * 3,
            lambda: holder.__delitem__(key),
            lambda: holder.__setitem__(key, _copy(_at(data, chance.choice(places)))),
            lambda: _rename(holder, key, chance),
            lambda: _repeat(holder, key, chance),
        )
    )
    change()
    return data


def _any(chance: random.Random) -> Any:
    """One of the values; a copy, since what is put into a document may be changed there."""
    return _copy(chance.choice(VALUES))


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _near(value: Any, chance: random.Random) -> Any:
    """A value of the same kind: a number somewhat larger or much, a text with a letter changed, a list in disorder."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        half = 0.5 if abs(value) < 1 << 53 else 1  # larger ones have none, or are no floats at all
        return chance.choice(
            (value + 1, value - 1, -value, value * 10 ** chance.randrange(1, 19), value + half)
        )
    if isinstance(value, float):
        return chance.choice((value * 1.5, -value, value * 10.0 ** chance.randrange(-300, 300), 0.0))
    if isinstance(value, str):
        at = chance.randrange(len(value) + 1)
        return value[:at] + chance.choice(("x", "", "_", "é", "\n", "'", "[", "%s", "{}")) + value[at + 1 :]
    items = list(value.items()) if isinstance(value, dict) else list(value)
    chance.shuffle(items)
    items = items[: chance.randrange(len(items) + 1)]
    return dict(items) if isinstance(value, dict) else items


def _rename(holder: Any, key: Any, chance: random.Random) -> None:
    if isinstance(holder, dict):
        holder[_near(key, chance)] = holder.pop(key)


def _repeat(holder: Any, key: Any, chance: random.Random) -> None:
    if isinstance(holder, list):
        holder.extend([_copy(holder[key])] * chance.choice((1, 2, 300)))
    else:
        holder[chance.choice(("", "x", "x-mine", "value", "name"))] = _copy(holder[key])


def _written(data: Any) -> str:
    """As JSON, with the values that are JSON already."""
    text = json.dumps(data)
    for value in VALUES:
        if isinstance(value, str) and value.startswith("json:"):
            text = text.replace(json.dumps(value), value.removeprefix("json:"))
    return text


def _garbled(text: str, chance: random.Random) -> str:
    at = chance.randrange(len(text) + 1)
    return chance.choice(
        (
            text[:at],
            text[at:],
            text[:at] + chance.choice(_GARBAGE) + text[at:],
            text[:at] + text[at + 1 :],
            text + text,
            text.replace('": ', '": 1, "', 1),
        )
    )


def arguments(options: Mapping[str, Any], chance: random.Random) -> list[str]:
    """The words of a command line: options with their usual values, a few of them left out, doubled or changed."""
    words: list[str] = []
    for name, usual in options.items():
        if chance.random() < 0.5:
            words += [name, str(usual)]
    for _ in range(chance.choice((1, 1, 2, 3))):
        name = chance.choice(list(options))
        words += [name, _word(chance)]
    if chance.random() < 0.1:
        words.insert(chance.randrange(len(words) + 1), _word(chance))
    return words


def _word(chance: random.Random) -> str:
    value = chance.choice(VALUES)
    text = value if isinstance(value, str) else json.dumps(value)
    text = text.removeprefix("json:").replace("\0", "")
    return chance.choice(
        (text[:6000], "/dev/zero", "/dev/null", "/", "inf", "-inf", "1e9", "100000000", "0x10")
    )
