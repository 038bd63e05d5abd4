"""Errors of shardwright as tests expect them: class and attributes, not prose; and a full disk, which makes some."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from shardwright.errors import ShardwrightError


@contextmanager
def raises(
    kind: type[ShardwrightError], *, possible: Iterable[str] = (), **attributes: Any
) -> Iterator[pytest.ExceptionInfo[ShardwrightError]]:
    """Expect an error.

    Args:
        kind: its class.
        possible: names that must be among those that it says are possible.
        attributes: attributes that it must have, by name.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert {name: getattr(error, name) for name in attributes} == attributes, error
    assert set(possible) <= set(error.possible), error


def error_of(function: Callable[..., Any], *arguments: Any) -> str:
    """The error that a call raises, as ``"Kind: text"``; ``"nothing was raised"``."""
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def taken(calls: Mapping[str, Callable[[], Any]], *words: str) -> set[str]:
    """The names of the calls that raise nothing; each other one must raise an error of ours with one of the words."""
    found = set()
    for name, call in calls.items():
        try:
            call()
            found.add(name)
        except Exception as error:
            if not isinstance(error, ShardwrightError) or not any(word in str(error) for word in words):
                error.add_note(f"raised by {name}")
                raise
    return found


def refused(calls: Iterable[Any]) -> Callable[..., None]:
    """A test of wrong calls: each row is the call, the class of its error and a pattern of the text."""

    @pytest.mark.parametrize(("call", "error", "text"), calls)
    def test(call: Callable[[], object], error: type[Exception], text: str) -> None:
        with pytest.raises(error, match=text):
            call()

    return test


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """A context in which no file can grow beyond a size: writes fail in the midst of it, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
