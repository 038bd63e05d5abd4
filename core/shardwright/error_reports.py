"""Errors in this process, reported to ranks that may wait for it in vain.

A batch that is not even a ``KeyedJaggedTensor`` raises on its rank alone, before any collective. Ranks that wait for
that rank until time is up then say why it did not come. So they do for an error that ends the program.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.util import Finalize
from typing import Protocol
from weakref import WeakSet

from shardwright.errors import ShardwrightError


class ErrorListener(Protocol):
    """Somebody who passes errors on."""

    def hear(self, text: str, *, is_last: bool = False) -> None:
        """Take a text: what happened in this process, and whether that ends it."""


_LISTENERS: WeakSet[ErrorListener] = WeakSet()


def listen(listener: ErrorListener) -> None:
    """Have ``listener`` hear of errors in this process, as long as it lives."""
    _LISTENERS.add(listener)
    _watch_the_end(os.getpid())


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Report an error raised inside to all listeners; the error goes on."""
    try:
        yield
    except ShardwrightError as error:
        for listener in list(_LISTENERS):
            listener.hear(f"raised {type(error).__name__}: {error}")
        raise


@cache
def _watch_the_end(process: int) -> None:
    """Report the error that ends this process, whether it is a program or was started by ``multiprocessing``."""
    Finalize(None, _report_end, exitpriority=0)


def _report_end() -> None:
    # The error of a program that has printed it, or of a process of multiprocessing that is about to.
    error = getattr(sys, "last_value", None) or sys.exception()
    while isinstance(error, SystemExit):
        error = error.__context__
    for listener in list(_LISTENERS) if error is not None else ():
        listener.hear(f"ended with {type(error).__name__}: {error}", is_last=True)
