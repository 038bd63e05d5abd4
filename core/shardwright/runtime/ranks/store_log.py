"""Logs in a process group's store: all ranks write lines, and each rank reads all lines in a few requests.

So ranks report to each other without each asking for every other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def get_all(store: Any, keys: Sequence[str]) -> list[str]:
    """Read the values of keys that exist."""
    if not keys:
        return []
    at_once = store.has_extended_api()
    return [text.decode() for text in (store.multi_get(list(keys)) if at_once else map(store.get, keys))]


def write_line(store: Any, log: str, text: str) -> None:
    """Add a line to a log; two requests."""
    store.set(f"{log}/{store.add(log, 1)}", text)


def _those_there(store: Any, keys: list[str]) -> list[str]:
    """Find the keys that exist, by halving the list: quick if few of many are missing."""
    if not keys or store.check(keys):
        return keys
    if len(keys) == 1:
        return []
    middle = len(keys) // 2
    return _those_there(store, keys[:middle]) + _those_there(store, keys[middle:])


class LogReader:
    """A reader of a log, line after line.

    Args:
        log: name of the log.
    """

    def __init__(self, log: str) -> None:
        self._log, self._count = log, 0
        self._awaited: list[int] = []  # numbers of lines that were given out and not read yet

    def read_on(self, store: Any) -> list[str]:
        """Read the lines written since the last call; three requests, unless a rank ended while it wrote.

        There may be none while ranks are writing: lines are read once no new line is announced.
        """
        count = int(store.add(self._log, 0))
        new = range(self._count + 1, count + 1)
        self._count, self._awaited = count, [*self._awaited, *new]
        keys = {number: f"{self._log}/{number}" for number in self._awaited}
        if keys and not store.check(list(keys.values())):
            if new:
                return []
            there = set(_those_there(store, list(keys.values())))
            keys = {number: key for number, key in keys.items() if key in there}
        self._awaited = [number for number in self._awaited if number not in keys]
        return get_all(store, list(keys.values()))
