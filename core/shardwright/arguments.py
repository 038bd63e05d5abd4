"""Arguments checked against their annotations, so that a wrong one is an error that names it and what was got.

Annotations are read when a function is first called, or a value first made. What a checker of types reads alone (names
imported under ``TYPE_CHECKING``) is passed over. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar, cast

import attrs
import numpy as np

from shardwright.errors import InvalidInputError, ShardwrightError, nearest

__all__ = ["UnderWay", "brief", "check_unmasked", "checked", "checked_only", "problem", "typed", "whole"]

F = TypeVar("F", bound=Callable[..., Any])

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
_Expected = tuple[Any, frozenset[type[Any]]]
_ANYTHING: _Expected = (Any, frozenset())
_LISTS = (Sequence, Collection, list)
_RAW_ERRORS = (TypeError, ValueError, AttributeError, LookupError, OverflowError, RuntimeError)


class UnderWay(ABC):
    """A result that is waited for on first use: functions that are :func:`checked` take it for what it becomes."""

    @abstractmethod
    def wait(self) -> Any:
        """Wait for the result and return it, the same one each time."""


def check_unmasked(owner: str, what: str, array: Any) -> None:
    """Check that nothing of an array of NumPy's is masked: most of its functions take what is behind the mask.

    Args:
        owner: who speaks.
        what: names the array in the error.
        array: any value.

    Raises:
        InvalidInputError: it is a masked array with masked elements.
    """
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        masked = int(np.ma.getmaskarray(array).sum())
        raise InvalidInputError(
            f"{owner}: of {what}, {masked} of {array.size} elements are masked, and have no value: give .filled(...) "
            "or .compressed()",
            subject=what,
            asked="mask",
        )


def checked(function: F) -> F:
    """Check the arguments of a function or method against its annotations before it runs.

    What is :class:`UnderWay` where another thing is wanted is waited for.

    Raises:
        InvalidInputError: names the argument, what it must be and what it is; raised by the function.
    """
    return _checked(function, list(inspect.signature(function).parameters))


def checked_only(*arguments: str) -> Callable[[F], F]:
    """Check some of the arguments, as :func:`checked` does; of the others the function has more to say itself."""
    return lambda function: _checked(function, arguments)


def _checked(function: F, arguments: Collection[str]) -> F:
    parameters = inspect.signature(function).parameters.values()
    names = [one.name for one in parameters if one.kind <= one.POSITIONAL_OR_KEYWORD]
    of, _, method = function.__qualname__.rpartition(".")
    owner = of if of and method.startswith("_") else function.__qualname__
    expected: dict[str, _Expected] = {}

    @functools.wraps(function)
    def checking(*args: Any, **kwargs: Any) -> Any:
        if not expected:
            annotations = {name: function.__annotations__.get(name, Any) for name in arguments}
            expected.update(_expected_of(annotations, function.__globals__))
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            hint, plain = expected.get(name, _ANYTHING)
            if type(value) not in plain and (wrong := problem(name, value, hint)):
                if _is_under_way(value):
                    return checking(
                        *map(_waited_for, args), **{own: _waited_for(of) for own, of in kwargs.items()}
                    )
                raise InvalidInputError(f"{owner}: {wrong}")
        return function(*args, **kwargs)

    return cast(F, checking)


def _is_under_way(value: Any) -> bool:
    """True for what is waited for on first use, and for a list of such."""
    return isinstance(value, UnderWay) or (type(value) in (list, tuple) and any(map(_is_under_way, value)))


def _waited_for(value: Any) -> Any:
    if isinstance(value, UnderWay):
        return value.wait()
    return type(value)(map(_waited_for, value)) if type(value) in (list, tuple) else value


def typed(cls: type[Any], fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    """Check the fields of an attrs class against their annotations: a ``field_transformer``.

    Converters and other validators come first; what they raise becomes an error that names the field. Then all fields
    are checked in one go, since a plan has thousands of such values.
    """
    own = [field for field in fields if not getattr(field, "inherited", False)]
    expected: dict[str, _Expected] = {}

    def validate(instance: Any, attribute: Any, value: Any) -> None:
        if not expected:
            module = inspect.getmodule(cls)
            expected.update(
                _expected_of({field.name: field.type for field in own}, vars(module) if module else {})
            )
        for name, (hint, plain) in expected.items():
            value = getattr(instance, name)
            if type(value) not in plain and (wrong := problem(name, value, hint)):
                raise InvalidInputError(f"{cls.__name__}: {wrong}")

    named = {field.name: _naming_field(cls, field) for field in own}
    *_, last = named.values()
    both = validate if last.validator is None else attrs.validators.and_(last.validator, validate)
    named[last.name] = last.evolve(validator=both)
    return [named.get(field.name, field) for field in fields]


def whole(value: Any) -> Any:
    """An integer of any library (as ``column.max() + 1`` gives it) as Python's; what is none, as it is."""
    if type(value) is int or isinstance(value, bool) or not isinstance(value, Integral):
        return value
    return int(value)


def _naming_field(cls: type[Any], field: attrs.Attribute[Any]) -> attrs.Attribute[Any]:
    """A field whose converter and validator raise errors of ours, which name it."""
    convert, validate = cast(Callable[[Any], Any] | None, field.converter), field.validator

    def converted(value: Any) -> Any:
        try:
            return value if convert is None else convert(value)
        except (ShardwrightError, *_RAW_ERRORS) as error:
            raise _naming(cls, field, value, error) from error

    if convert is not None:  # attrs takes the types in the signature of the class from its converters
        taken = next(iter(inspect.signature(convert).parameters.values())).annotation
        converted.__annotations__["value"] = (
            field.type if taken in ("Any", inspect.Parameter.empty) else taken
        )

    def validated(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        try:
            cast(Callable[..., None], validate)(instance, attribute, value)
        except (ShardwrightError, *_RAW_ERRORS) as error:
            raise _naming(cls, field, value, error) from error

    return field.evolve(
        converter=None if convert is None else converted, validator=None if validate is None else validated
    )


def _naming(cls: type[Any], field: attrs.Attribute[Any], value: Any, error: Exception) -> ShardwrightError:
    """Turn an error about a field's value into one of ours that names the field."""
    reason = str(error.args[0]) if error.args else type(error).__name__
    if isinstance(error, ShardwrightError):
        return type(error)(reason if field.name in reason else f"{cls.__name__}: {field.name}: {reason}")
    return InvalidInputError(f"{cls.__name__}: {field.name} cannot be {brief(value)}: {reason}")


@functools.cache
def _plain_kinds(hint: Any) -> frozenset[type[Any]]:
    """The classes whose very instances go with an annotation, whatever is in them."""
    kinds = {kind for kind in _alternatives(hint) if isinstance(kind, type)}
    if any(_is_device(kind) for kind in kinds):
        kinds -= {int, str}  # they may name one that there is not
    return frozenset(kinds | {int}) if float in kinds else frozenset(kinds)


def _is_device(kind: Any) -> bool:
    return getattr(kind, "__module__", "") == "torch" and _name(kind) == "device"


def _alternatives(hint: Any) -> tuple[Any, ...]:
    if (typing.get_origin(hint) or hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def problem(name: str, value: Any, hint: Any) -> str:
    """Explain how a value contradicts an annotation; empty if it does not.

    Integers are no numbers with a fraction of 0, nor is ``True`` one; texts are no lists of texts.
    """
    kind = typing.get_origin(hint) or hint
    if kind is Any or isinstance(kind, TypeVar) or type(value) in _plain_kinds(hint):
        return ""
    if kind in (typing.Union, types.UnionType):
        return _problem_of_union(name, value, hint)
    if not _is_of(kind, value, hint):
        is_name = kind is typing.Literal and isinstance(value, str)
        guess = nearest(value, [str(one) for one in typing.get_args(hint)]) if is_name else ""
        return f"{name} must be {_described(hint)}, got {brief(value)}{'.' * bool(guess)}{guess}"
    return next(filter(None, _problems_inside(name, value, kind, typing.get_args(hint))), "")


def _problem_of_union(name: str, value: Any, hint: Any) -> str:
    """Of the alternatives, the one that a value comes nearest to says what is wrong with what is in it."""
    found = [problem(name, value, one) for one in typing.get_args(hint)]
    if "" in found:
        return _problem_of_device(name, value, hint)
    inside = [text for text in found if not text.startswith(f"{name} must")]
    return inside[0] if inside else f"{name} must be {_described(hint)}, got {brief(value)}"


def _problem_of_device(name: str, value: Any, hint: Any) -> str:
    """Return torch's objection to a text that is to name a device; empty if it has none."""
    devices = [one for one in typing.get_args(hint) if _is_device(one)]
    if isinstance(value, str | int) and devices:
        try:
            devices[0](value)
        except (RuntimeError, ValueError) as error:
            return f"{name} must be a device, got {value!r}: {str(error).splitlines()[0]}"
    return ""


def _is_of(kind: Any, value: Any, hint: Any) -> bool:
    """True if a value is of a kind, whatever is in it."""
    if kind is typing.Literal:
        return value in typing.get_args(hint)
    if kind is None:
        return value is None
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    if kind in (Callable, typing.Callable) or getattr(kind, "_is_protocol", False):
        return callable(value)
    if kind is type:
        (of,) = typing.get_args(hint) or (object,)
        return isinstance(value, type) and (not isinstance(of, type) or issubclass(value, of))
    if kind in (*_LISTS, Iterable, tuple):
        is_scalar = getattr(value, "ndim", None) == 0  # which says that it can be gone through, and cannot
        if is_scalar or isinstance(value, str | bytes | Mapping):
            return False
    return not isinstance(kind, type) or isinstance(value, kind)


def _problems_inside(name: str, value: Any, kind: Any, arguments: tuple[Any, ...]) -> Iterator[str]:
    if not arguments:
        return
    if kind in (Sequence, Collection, list, tuple):
        if not isinstance(value, list | tuple):
            return  # it may be made as it is looked at
        is_fixed = kind is tuple and arguments[-1] is not Ellipsis
        if is_fixed and len(value) != len(arguments):
            yield f"{name} must have {len(arguments)} items, got {brief(value)}"
            return
        if not is_fixed and _plain_kinds(arguments[0]).issuperset(map(type, value)):
            return
        for index, item in enumerate(value):
            yield problem(f"{name}[{index}]", item, arguments[index if is_fixed else 0])
    elif isinstance(kind, type) and issubclass(kind, Mapping):
        for key, item in value.items():
            yield problem(f"a key of {name}", key, arguments[0])
            yield problem(f"{name}[{key!r}]", item, arguments[-1])


def _described(hint: Any) -> str:
    """``an integer or None``, ``a list of texts``."""
    kind, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if hint in _WORDS:
        return _WORDS[hint]
    if kind in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_described, arguments)))
    if kind is typing.Literal:
        return " or ".join(map(repr, arguments))
    if kind in (*_LISTS, Iterable, tuple):
        return (
            f"a list (each: {_described(arguments[0])})"
            if arguments and arguments[0] is not Any
            else "a list"
        )
    if kind in (Callable, typing.Callable) or getattr(kind, "_is_protocol", False):
        return "a function"
    if kind is type:
        return f"a class of {_name(arguments[0])}" if arguments else "a class"
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return (
            f"a dict (from {_described(arguments[0])} to {_described(arguments[1])})"
            if arguments
            else "a dict"
        )
    return f"a {_name(kind)}" if _name(kind)[:1].lower() not in "aeiou" else f"an {_name(kind)}"


def _name(hint: Any) -> str:
    return str(getattr(hint, "__name__", hint))


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


def _expected_of(annotations: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, _Expected]:
    """Evaluate annotations that can be had when a program runs, and find the classes that surely go with them."""
    hints = {name: _evaluated(hint, names) for name, hint in annotations.items()}
    return {name: (hint, _plain_kinds(hint)) for name, hint in hints.items() if hint not in (Any, object)}


def _evaluated(hint: Any, names: Mapping[str, Any]) -> Any:
    if not isinstance(hint, str):
        return Any if hint is None else hint
    try:
        return eval(hint, dict(names))
    except (NameError, AttributeError, TypeError):
        return Any
