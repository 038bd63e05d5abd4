"""Arguments checked against their annotations, so that a wrong one is an error that names it and what was got.

An annotation may bear the range of a number, ``Annotated[int, Within(ge=1)]``; those that are common have names here.
Annotations are read when a function is first called, or a value first made. What a checker of types reads alone (names
imported under ``TYPE_CHECKING``) is passed over. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, KeysView, Mapping, Sequence, Set
from numbers import Integral, Real
from typing import Annotated, Any, TypeVar, cast

import attrs
import numpy as np

from shardwright._annotations import NOT_PLAIN, Kinds, Within, brief, plain_kinds, problem, some
from shardwright.errors import InvalidInputError, ShardwrightError, nearest

__all__ = [
    "FiniteFloat",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "UnderWay",
    "Within",
    "as_value",
    "brief",
    "check",
    "check_unmasked",
    "checked",
    "checked_only",
    "listed",
    "not_empty",
    "problem",
    "real",
    "some",
    "typed",
    "whole",
]

F = TypeVar("F", bound=Callable[..., Any])

_ANYTHING: tuple[Any, Kinds] = (Any, {})
_RAW_ERRORS = (TypeError, ValueError, AttributeError, LookupError, OverflowError, RuntimeError)


PositiveInt = Annotated[int, Within(ge=1)]
NonNegativeInt = Annotated[int, Within(ge=0)]
PositiveFloat = Annotated[float, Within(gt=0)]
NonNegativeFloat = Annotated[float, Within(ge=0)]
FiniteFloat = Annotated[float, Within()]


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

    Where an argument is wrong, those that are :class:`UnderWay` are waited for, and all are looked at again.

    Raises:
        InvalidInputError: names the argument (its subject), what it must be and what it is; raised by the function.
    """
    return checked_only(*inspect.signature(function).parameters)(function)


def checked_only(*arguments: str) -> Callable[[F], F]:
    """Check some of the arguments, as :func:`checked` does; of the others the function has more to say itself."""

    def decorate(function: F) -> F:
        parameters = inspect.signature(function).parameters.values()
        names = [one.name for one in parameters if one.kind <= one.POSITIONAL_OR_KEYWORD]
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
        taken = {one.name for one in parameters}
        method = function.__name__
        annotations = {name: function.__annotations__.get(name, Any) for name in arguments}
        expected = _Annotations(annotations, function.__module__)

        def caller(args: Sequence[Any]) -> str:
            # A method speaks for the class that the user calls, which may be derived from the one that has it.
            if not args or "self" not in taken:
                return function.__qualname__
            return type(args[0]).__name__ + (f".{method}" if not method.startswith("_") else "")

        @functools.wraps(function)
        def checking(*args: Any, **kwargs: Any) -> Any:
            if wrong := expected.wrong((*zip(names, args, strict=False), *kwargs.items())):
                if any(map(_is_under_way, (*args, *kwargs.values()))):
                    return checking(
                        *map(_waited_for, args), **{own: _waited_for(of) for own, of in kwargs.items()}
                    )
                raise InvalidInputError(f"{caller(args)}: {wrong[1]}", subject=wrong[0])
            if not (takes_any or kwargs.keys() <= taken):
                unknown = min(kwargs.keys() - taken)
                raise TypeError(
                    f"{caller(args)}() got an unexpected keyword argument {unknown!r}.{nearest(unknown, taken)}"
                )
            return function(*args, **kwargs)

        return cast(F, checking)

    return decorate


def _is_under_way(value: Any) -> bool:
    """True for what is waited for on first use, and for a list of such."""
    return isinstance(value, UnderWay) or (type(value) in (list, tuple) and any(map(_is_under_way, value)))


def _waited_for(value: Any) -> Any:
    if isinstance(value, UnderWay):
        return value.wait()
    return type(value)(map(_waited_for, value)) if type(value) in (list, tuple) else value


class _Annotations:
    """Annotations by name, evaluated when they are first needed."""

    def __init__(self, annotations: Mapping[str, Any], module: str) -> None:
        self._annotations, self._module = annotations, module
        self._hints: dict[str, tuple[Any, Kinds]] = {}

    def wrong(self, values: Iterable[tuple[str, Any]]) -> tuple[str, str] | None:
        """Name the first value that contradicts its annotation, and explain how."""
        if not self._hints:
            names = vars(sys.modules[self._module])
            hints = {name: _evaluated(hint, names) for name, hint in self._annotations.items()}
            self._hints = {name: (hint, plain_kinds(hint)) for name, hint in hints.items()}
        for name, value in values:
            hint, plain = self._hints.get(name, _ANYTHING)
            within = plain.get(type(value), NOT_PLAIN)
            if within is None or (within and within.holds(value)):
                continue
            if text := problem(name, value, hint):
                return name, text
        return None


def _evaluated(hint: Any, names: Mapping[str, Any]) -> Any:
    """An annotation as it is when a program runs; anything, where it names what only a checker of types imports."""
    try:
        return eval(hint, dict(names)) if isinstance(hint, str) else hint
    except (NameError, AttributeError, TypeError):
        return Any


def typed(cls: type[Any], fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    """Check the fields of an attrs class against their annotations: a ``field_transformer``.

    Converters come first; what they raise becomes an error that names the field. Then all fields are checked in one go,
    since a plan has thousands of such values, and then the class's own validators, whose values are of the right type.
    """
    own = [field for field in fields if not getattr(field, "inherited", False)]
    expected = _Annotations({field.name: field.type for field in own}, cls.__module__)

    def validate(instance: Any, attribute: Any, value: Any) -> None:
        if wrong := expected.wrong((field.name, getattr(instance, field.name)) for field in own):
            name = getattr(instance, "name", None)
            called = f" {name!r}" if isinstance(name, str) and name else ""
            raise InvalidInputError(f"{type(instance).__name__}{called}: {wrong[1]}", subject=wrong[0])

    named = {field.name: _naming_field(cls, field) for field in fields}
    first = named[own[0].name]
    both = validate if first.validator is None else attrs.validators.and_(validate, first.validator)
    named[first.name] = first.evolve(validator=both)
    return [named.get(field.name, field) for field in fields]


def whole(value: Any) -> Any:
    """An integer of any library (as ``column.max() + 1`` gives it) as Python's; what is none, as it is."""
    return int(value) if not isinstance(value, bool) and isinstance(value, Integral) else value


def real(value: Any) -> Any:
    """A number of any library as a float; what is none, as it is."""
    is_number = isinstance(value, Real) or getattr(value, "ndim", None) == 0
    return float(value) if is_number and not isinstance(value, bool) else value


def as_value(cls: type[Any], value: Any) -> Any:
    """JSON data of an attrs class as an object of it; what is no mapping, as it is.

    Raises:
        InvalidInputError: the data has another key than the class's fields; the text has the nearest.
    """
    if not isinstance(value, Mapping):
        return value
    known = [field.name for field in attrs.fields(cls)]
    for key in value:
        if key not in known:
            raise InvalidInputError(
                f"{cls.__name__} has no {key!r}. Known: {', '.join(known)}.{nearest(str(key), known)}"
            )
    return cls(**value)


def listed(values: Any) -> tuple[Any, ...]:
    """The items of a list, an array or anything else that has an order.

    Raises:
        InvalidInputError: it is one value, or has no order.
    """
    if isinstance(values, str | Real):
        raise InvalidInputError(f"expected a list, got {values!r}; write [{values!r}]")
    is_unordered = isinstance(values, Mapping | Set) and not isinstance(values, KeysView)
    if is_unordered or isinstance(values, bytes) or not isinstance(values, Iterable):
        raise InvalidInputError(f"expected a list, got {brief(values)}")
    return tuple(values)


def not_empty(instance: Any, attribute: Any, value: str | tuple[Any, ...] | None) -> None:
    """Check, as an attrs validator, that a text or a tuple has something in it, and a tuple no empty text.

    Raises:
        InvalidInputError: it has nothing in it.
    """
    if value is not None and (not value or "" in (value if isinstance(value, tuple) else ())):
        raise InvalidInputError(
            f"{type(instance).__name__}: {attribute.name} must not be empty, got {value!r}",
            subject=attribute.name,
        )


def _naming_field(cls: type[Any], field: attrs.Attribute[Any]) -> attrs.Attribute[Any]:
    """A field whose converter raises errors of ours, which name it."""
    convert = cast(Callable[[Any], Any] | None, getattr(field.converter, "converts", field.converter))
    if convert is None:
        return field

    def converted(value: Any) -> Any:
        try:
            return convert(value)
        except (ShardwrightError, *_RAW_ERRORS) as error:
            reason = f"{cls.__name__}: {field.name} cannot be {brief(value)}: {error or type(error).__name__}"
            kind = type(error) if isinstance(error, ShardwrightError) else InvalidInputError
            raise kind(reason, subject=field.name, possible=getattr(error, "possible", ())) from error

    converted.converts = convert  # type: ignore[attr-defined]  # a derived class names itself
    # attrs takes the types in the signature of the class from its converters.
    taken = next(iter(inspect.signature(convert).parameters.values())).annotation
    converted.__annotations__["value"] = field.type if taken in ("Any", inspect.Parameter.empty) else taken
    return field.evolve(converter=converted)


def check(name: str, value: Any, hint: Any) -> None:
    """Check a value against an annotation.

    Raises:
        InvalidInputError: it contradicts it.
    """
    if wrong := problem(name, value, hint):
        raise InvalidInputError(wrong, subject=name)
