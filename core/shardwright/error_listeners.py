"""Errors in this process, told to ranks that may wait for it in vain.

A batch that is not even a ``KeyedJaggedTensor`` raises on its rank alone, before any collective. If the others then
wait for that rank until time is up, they are told why. So they are of an error that ends the program.
"""

from __future__ import annotations

import atexit
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from shardwright.errors import ShardwrightError


class ErrorListener(ABC):
    """Somebody who passes errors on."""

    @abstractmethod
    def hear(self, text: str) -> None:
        """Take a text."""


_listeners: WeakKeyDictionary[ErrorListener, int] = WeakKeyDictionary()


def listen(listener: ErrorListener) -> None:
    """Have ``listener`` hear of errors in this process, as long as it lives; not in one that is forked from it."""
    _listeners[listener] = os.getpid()


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Tell all listeners of an error raised inside; the error goes on."""
    try:
        yield
    except ShardwrightError as error:
        for listener, process in list(_listeners.items()):
            if process == os.getpid():
                listener.hear(f"{type(error).__name__}: {error}")
        raise


@atexit.register
def _tell_at_end() -> None:
    """Tell the ranks of all process groups what this program ends with, if that is an error."""
    error = getattr(sys, "last_value", None)  # which Python sets before it prints an error that nobody caught
    distributed = sys.modules.get("torch.distributed")
    if error is not None and distributed is not None and distributed.is_initialized():
        from shardwright.runtime.ranks.failure_reports import tell_at_end

        tell_at_end(f"{type(error).__name__}: {error}")
