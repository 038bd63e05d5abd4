"""A value against an annotation: how it contradicts it, said for people.

An annotation may bear the range of a number, ``Annotated[int, Within(ge=1)]``. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from numbers import Integral, Real
from typing import Annotated, Any, TypeAlias, TypeVar

import attrs

from shardwright.errors import nearest

Kinds: TypeAlias = "Mapping[type[Any], Within | None]"


_MOST_SHOWN = 120


_WORDS: Mapping[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "True or False",
    str: "a text",
    types.NoneType: "None",
    Any: "anything",
    object: "anything",
}


_NUMBERS: Mapping[Any, type[Any]] = {int: Integral, float: Real}


_LISTS = (Sequence, Collection, list, tuple)


NOT_PLAIN: Any = ()


@attrs.frozen(kw_only=True)
class Within:
    """Range of a number, in an annotation: ``Annotated[float, Within(gt=0, le=1)]``. Infinity is outside by default."""

    ge: float = -math.inf
    gt: float = -math.inf
    le: float = math.inf
    lt: float = math.inf

    def holds(self, value: Any) -> bool:
        """True if a number is in the range; not a number (NaN) is in none."""
        return bool(self.ge <= value <= self.le and self.gt < value < self.lt)

    def __str__(self) -> str:
        """``from 0 to 1``."""
        words = {"from": self.ge, "above": self.gt, "to": self.le, "below": self.lt}
        return "".join(f" {word} {limit}" for word, limit in words.items() if math.isfinite(limit))


@functools.cache
def plain_kinds(hint: Any) -> Kinds:
    """The classes whose very instances go with an annotation, whatever is in them; the range of those of numbers."""
    kinds: dict[type[Any], Within | None] = {}
    for one in _alternatives(hint):
        kind, within = typing.get_args(one) if typing.get_origin(one) is Annotated else (one, None)
        kinds |= {plain: within for plain in (int, kind) if plain is kind or kind is float}
    return {kind: within for kind, within in kinds.items() if isinstance(kind, type)}


@functools.cache
def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The alternatives of an annotation. Beside a device, a text or a number names one, which there must be."""
    if (typing.get_origin(hint) or hint) not in (typing.Union, types.UnionType):
        return (hint,)
    kinds = typing.get_args(hint)
    names = (int, str) if any(map(_is_device, kinds)) else ()
    return tuple(kind for kind in kinds if kind not in names)


def _is_device(kind: Any) -> bool:
    return getattr(kind, "__module__", "") == "torch" and _name(kind) == "device"


def problem(name: str, value: Any, hint: Any) -> str:
    """Explain how a value contradicts an annotation; empty if it does not.

    Integers are no numbers with a fraction of 0, nor is ``True`` one; texts are no lists of texts.
    """
    alternatives = _alternatives(hint)
    if hint is Any or isinstance(hint, TypeVar) or plain_kinds(hint).get(type(value), NOT_PLAIN) is None:
        return ""
    if len(alternatives) > 1:
        found = [problem(name, value, one) for one in alternatives]
        # The alternative that a value comes nearest to says what is wrong with what is in it.
        inside = [text for text in found if text and not text.startswith(f"{name} must")]
        return "" if "" in found else inside[0] if inside else _must(name, value, hint)
    (hint,) = alternatives
    kind, of = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is Annotated:
        is_right = not problem(name, value, of[0]) and of[1].holds(value)
        return "" if is_right else _must(name, value, hint)
    if not _is_of(kind, value, of):
        return _must(name, value, hint)
    return next(filter(None, _problems_inside(name, value, kind, of)), "")


def _must(name: str, value: Any, hint: Any) -> str:
    is_name = typing.get_origin(hint) is typing.Literal and isinstance(value, str)
    guess = nearest(value, [str(one) for one in typing.get_args(hint)]) if is_name else ""
    return f"{name} must be {_described(hint)}, got {brief(value)}{'.' * bool(guess)}{guess}"


def _is_of(kind: Any, value: Any, of: tuple[Any, ...]) -> bool:
    """True if a value is of a kind, whatever is in it."""
    if kind is typing.Literal:
        return isinstance(value, tuple(map(type, of))) and value in of
    if kind in _NUMBERS:
        return isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool)
    if _is_function(kind):
        return callable(value)
    if kind is type:
        return isinstance(value, type) and (not isinstance(of[0], type) or issubclass(value, of[0]))
    if _is_device(kind) and type(value) in (str, int):
        try:
            return bool(kind(value))
        except (RuntimeError, ValueError):
            return False
    if kind in (*_LISTS, Iterable):
        is_scalar = getattr(value, "ndim", None) == 0  # which says that it can be gone through, and cannot
        if is_scalar or isinstance(value, str | bytes | Mapping):
            return False
    return not isinstance(kind, type) or isinstance(value, kind)


def _is_function(kind: Any) -> bool:
    return kind in (Callable, typing.Callable) or getattr(kind, "_is_protocol", False)


def _problems_inside(name: str, value: Any, kind: Any, of: tuple[Any, ...]) -> Iterator[str]:
    if kind in _LISTS and of and isinstance(value, list | tuple):  # others may be made as they are looked at
        is_fixed = kind is tuple and of[-1] is not Ellipsis
        if is_fixed and len(value) != len(of):
            yield f"{name} must have {len(of)} items, got {brief(value)}"
        elif is_fixed or any(plain_kinds(of[0]).get(type(one), NOT_PLAIN) is not None for one in value):
            kinds = of if is_fixed else of[:1] * len(value)
            yield from (
                problem(f"{name}[{place}]", *pair)
                for place, pair in enumerate(zip(value, kinds, strict=True))
            )
    elif of and isinstance(kind, type) and issubclass(kind, Mapping):
        for key, item in value.items():
            yield problem(f"a key of {name}", key, of[0])
            yield problem(f"{name}[{key!r}]", item, of[-1])


def _described(hint: Any) -> str:
    """``an integer or None``, ``a list of texts``."""
    kind, of = typing.get_origin(hint) or hint, typing.get_args(hint)
    if hint in _WORDS:
        return _WORDS[hint]
    if kind is Annotated:
        return ("a finite number" if of[0] is float else _described(of[0])) + str(of[1])
    if kind in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_described, of)))
    if kind is typing.Literal:
        return " or ".join(map(repr, of))
    if kind in (*_LISTS, Iterable):
        return f"a list (each: {_described(of[0])})" if of and of[0] is not Any else "a list"
    if _is_function(kind):
        return "a function"
    if kind is type:
        return f"a class of {_name(of[0])}" if of else "a class"
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return f"a dict (from {_described(of[0])} to {_described(of[1])})" if of else "a dict"
    return f"a {_name(kind)}" if _name(kind)[:1].lower() not in "aeiou" else f"an {_name(kind)}"


def _name(hint: Any) -> str:
    return str(getattr(hint, "__name__", hint))


def some(names: Collection[Any], most: int = 10) -> str:
    """Names for an error text: the first ones, and the number of the others."""
    listed = ", ".join(map(repr, islice(names, most)))
    return f"{listed} and {len(names) - most} more" if len(names) > most else listed or "none"


def brief(value: Any) -> str:
    """A value for an error text: short, and never another error."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    shape = getattr(value, "shape", None)
    if shape is not None and not isinstance(value, Real):
        return f"a {type(value).__name__} of {getattr(value, 'dtype', 'shape')} {list(shape)}"
    try:
        text = " ".join(repr(value).split())
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}... ({type(value).__name__})"
