"""Arguments checked against annotations: what goes with which, and what is said of what does not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import attrs
import numpy as np
import pytest
import torch
from tests.core.public_values import arguments_of, untold
from tests.core.stubs import OWN_NAMES

import shardwright as sw
from shardwright.arguments import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Within,
    brief,
    checked,
    problem,
    typed,
)
from shardwright.errors import InvalidInputError, UnknownNameError


@pytest.mark.parametrize(
    ("hint", "right", "wrong"),
    [
        (int, [1, -3, np.int64(2)], [True, 1.0, "1", None, torch.tensor(1)]),
        (float, [1, 1.5, float("nan"), np.float32(1), np.int8(1)], [True, "1", None]),
        (bool, [True], [1, None]),
        (str, ["", "a"], [b"a", None]),
        (int | None, [1, None], [1.0, []]),
        (Sequence[str], [[], ["a"], ("a",)], ["a", ["a", 1], {"a": 1}, iter(["a"]), torch.tensor(1)]),
        (list[int], [[], [1]], [(), (1,), [True]]),
        (tuple[str, ...], [(), ("a",)], [[], ["a"], ("a", 1)]),
        (tuple[str, int], [("a", 1)], [("a",), ("a", "b"), ["a", 1]]),
        (Iterable[str], [["a"], iter([1])], [5, "a"]),
        (Mapping[str, int], [{}, {"a": 1}], [{"a": "b"}, {1: 1}, [], None]),
        (Callable[..., Any], [len, int], [5, "len"]),
        (type[Exception], [ValueError], [ValueError(), int, "ValueError"]),
        (Literal["a", "b"], ["a"], ["c", None]),
        (torch.device | str | None, ["cpu", torch.device("cpu"), None], ["nowhere", 1.5]),
        (Any, [object()], []),
        (PositiveInt, [1, np.int64(2), 10**30], [0, -1, 1.0, True, "1", None]),
        (NonNegativeFloat | None, [0, 1.5, np.float32(2), None], [-1, math.inf, math.nan, "1", True]),
        (Annotated[float, Within(gt=0, le=1)], [1, 0.5], [0, 0.0, 1.1, math.nan]),
        (list[NonNegativeInt], [[], [0]], [[-1], [0, True], (0,)]),
        (Mapping[str, PositiveFloat], [{"a": 0.1}], [{"a": 0}, {"a": math.inf}]),
    ],
    ids=lambda value: "" if isinstance(value, list) else str(value),
)
def test_problem_tells_what_goes_with_an_annotation(hint: Any, right: list[Any], wrong: list[Any]) -> None:
    def taking(value: Any) -> None: ...

    taking.__annotations__["value"] = hint
    decorated = checked(taking)  # whose quick answer must be the same
    for value in right:
        assert problem("value", value, hint) == ""
        decorated(value)
    for value in wrong:
        assert "value" in problem("value", value, hint)
        with pytest.raises(InvalidInputError, match=r"taking: .*value"):
            decorated(value)


@pytest.mark.parametrize(
    ("value", "hint", "text"),
    [
        ([1, None], Sequence[int], "sizes[1] must be an integer, got None"),
        ({"a": "b"}, Mapping[str, int], "sizes['a'] must be an integer, got 'b'"),
        ({1: 2}, Mapping[str, int], "a key of sizes must be a text, got 1"),
        (5, Sequence[int] | None, "sizes must be a list (each: an integer) or None, got 5"),
        (int, Sequence[int], "sizes must be a list (each: an integer), got the class int"),
        (
            torch.zeros(2, 3),
            int | str,
            "sizes must be an integer or a text, got a Tensor of torch.float32 [2, 3]",
        ),
        ("nowhere", torch.device | str, "sizes must be a device, got 'nowhere'"),
        (0, PositiveInt | None, "sizes must be an integer from 1 or None, got 0"),
        (
            [1.5],
            tuple[Annotated[float, Within(ge=0, lt=1)], ...],
            "sizes must be a list (each: a finite number from 0 below 1)",
        ),
        (
            (1.5,),
            tuple[Annotated[float, Within(ge=0, lt=1)], ...],
            "sizes[0] must be a finite number from 0 below 1, got 1.5",
        ),
    ],
)
def test_problem_names_the_place_and_the_value(value: Any, hint: Any, text: str) -> None:
    assert problem("sizes", value, hint).startswith(text)


def _doubled(value: Any) -> Any:
    if value == "odd":
        raise UnknownNameError("3 is odd")
    return value + value


def _below_100(instance: Any, attribute: Any, value: int) -> None:
    if value >= 100:
        raise UnknownNameError(f"twice is {value}")


@attrs.frozen(field_transformer=typed)
class Pair:
    twice: int = attrs.field(converter=_doubled, validator=_below_100)
    name: str = "x"


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ([None], InvalidInputError, r"^Pair: twice cannot be None: unsupported operand"),
        (
            ["a"],
            InvalidInputError,
            r"^Pair 'x': twice must be an integer, got 'aa'",
        ),  # the validator gets numbers
        (["odd"], UnknownNameError, r"^Pair: twice cannot be 'odd': 3 is odd$"),
        ([1.0], InvalidInputError, r"^Pair 'x': twice must be an integer, got 2\.0$"),
        ([50], UnknownNameError, r"^twice is 100$"),
        ([1, 5], InvalidInputError, r"^Pair: name must be a text, got 5$"),
    ],
)
def test_typed_class_names_the_field_whatever_raised(
    values: list[Any], error: type[Exception], text: str
) -> None:
    assert Pair(2) == Pair(twice=2, name="x")
    with pytest.raises(error, match=text):
        Pair(*values)


class Base:
    @checked
    def __init__(self, size: int = 0) -> None:
        self.size = size


class Derived(Base):
    pass


def test_inherited_method_names_the_class_that_was_called() -> None:
    batch = sw.KeyedJaggedTensor.empty()
    with pytest.raises(InvalidInputError, match=r"^KeyedJaggedTensor\.to: device"):
        batch.to([])  # type: ignore[arg-type]


def test_unexpected_argument_is_an_error_of_the_class_that_was_called() -> None:
    with pytest.raises(
        TypeError, match=r"^Derived\(\) got an unexpected keyword argument 'sise'\. Did you mean 'size'\?"
    ):
        Derived(sise=3)  # type: ignore[call-arg]


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError


def test_brief_is_short_and_never_an_error() -> None:
    assert brief(Unprintable()) == "a Unprintable"
    assert len(brief("a" * 1000)) < 150
    assert brief({"a": 1}) == "{'a': 1}"


def test_signatures_of_public_values_say_what_their_arguments_take():
    """A converter takes more than the field holds; `help()` and the reference show what it takes."""
    told = arguments_of(OWN_NAMES)
    assert untold(OWN_NAMES) == []
    assert told["ParameterConstraints.ranks"] == "int | Iterable[int] | None"
