"""Wrong arguments to the public entry points: an error of ours that names the argument, never another of Python's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import strategies as st
from tests.drawn import drawn
from tests.errors import taken
from tests.plugins import misuse
from tests.plugins.misuse import ENTRIES, WRONG, Entry

from shardwright.errors import ShardwrightError
from shardwright.optim import fused


@pytest.fixture(autouse=True, scope="module")
def own_registry() -> Iterator[None]:
    """What is registered here is forgotten again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "_REGISTERED", dict(fused._REGISTERED))
        yield


@pytest.mark.parametrize("name", ENTRIES)
def test_entry_point_takes_valid_arguments(name: str) -> None:
    ENTRIES[name].with_wrong({})


@pytest.mark.parametrize(
    ("name", "argument"),
    [(name, argument) for name, entry in ENTRIES.items() for argument in entry.arguments],
)
def test_wrong_argument_is_an_error_that_names_it(name: str, argument: str) -> None:
    entry = ENTRIES[name]
    expected = entry.arguments[argument]
    calls = {
        kind: partial(entry.with_wrong, {argument: make()})
        for kind, make in WRONG.items()
        if kind not in expected.untried
    }
    assert taken(calls, *filter(None, [argument, expected.says])) == expected.accepts


LEAVES = st.sampled_from(sorted(WRONG)).map(lambda kind: WRONG[kind]())
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(["a", "sgd", "sum", ""]), inner, max_size=2)
    ),
    max_leaves=4,
)


def near(valid: Any) -> st.SearchStrategy[Any]:
    """Values that look like a valid one: a list with something else in it, or a dict with another value."""
    if isinstance(valid, list | tuple):
        return VALUES | VALUES.map(lambda other: type(valid)([*valid, other]))
    if isinstance(valid, dict):
        return VALUES | VALUES.map(lambda other: {**valid, "x": other})
    return VALUES


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, Entry, dict[str, Any]]:
    """An entry point, and wrong values of one to three of its arguments."""
    name = draw(st.sampled_from(sorted(ENTRIES)))
    entry = ENTRIES[name]
    arguments = [key for key, argument in entry.arguments.items() if not argument.untried]
    chosen = draw(st.lists(st.sampled_from(arguments), max_size=3, unique=True)) if arguments else []
    return name, entry, {key: draw(near(entry.arguments[key].valid)) for key in chosen}


@drawn(calls(), quick=300, thorough=1500)
def test_drawn_misuse_is_taken_or_an_error_of_ours(call: tuple[str, Entry, dict[str, Any]]) -> None:
    name, entry, wrong = call
    taken({f"{name} with {wrong!r}": lambda: entry.with_wrong(wrong)}, "")


def test_learning_rate_under_both_of_its_names_is_refused() -> None:
    with pytest.raises(ShardwrightError, match="fused_params have lr and learning_rate, which are one"):
        misuse.sharder(lr=0.1, learning_rate=0.2)


def test_misspelt_fused_parameter_is_told_the_nearest() -> None:
    with pytest.raises(LookupError, match=r"'sgd' has no parameter 'optimzer'.*Did you mean 'optimizer'\?"):
        misuse.sharder(optimzer="adam")
    with pytest.raises(LookupError, match=r"'adam' has no parameter 'beta_1'.*Did you mean 'beta1'\?"):
        misuse.sharder(optimizer="adam", beta_1=0.5)
