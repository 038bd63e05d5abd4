"""Errors of shardwright as tests expect them: class and attributes, not prose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
