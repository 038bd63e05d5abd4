"""Errors of shardwright as tests expect them: class and attributes, not prose; and a full disk, which makes some."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Iterator
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
