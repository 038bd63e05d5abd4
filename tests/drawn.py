"""Laws over drawn examples: a few in each run, many in the slow one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy


def drawn(
    *strategies: SearchStrategy[Any], quick: int, thorough: int, **named: SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """A decorator like `hypothesis.given`, for tests without fixtures.

    Args:
        strategies: for the law's arguments, as `given` takes them.
        quick: number of examples that each run draws.
        thorough: number of examples of a second test, which is marked slow.
        named: strategies for arguments by keyword.
    """

    def decorate(law: Callable[..., None]) -> Callable[[int], None]:
        tests = {
            number: settings(max_examples=number, deadline=None)(given(*strategies, **named)(law))
            for number in (quick, thorough)
        }

        @pytest.mark.parametrize("examples", [quick, pytest.param(thorough, marks=pytest.mark.slow)])
        @functools.wraps(law, assigned=("__module__", "__name__", "__qualname__", "__doc__"), updated=())
        def test(examples: int) -> None:
            tests[examples]()

        del test.__wrapped__  # pytest would ask for the law's arguments
        return test

    return decorate
