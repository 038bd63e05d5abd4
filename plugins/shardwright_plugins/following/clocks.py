"""Clocks around the calls of a running model: those of kernels, and the parts of a collection's step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

LOOKUP, UPDATE = range(2)
_CALLS = {
    LOOKUP: ("forward",),
    UPDATE: ("prepare", "anticipate", "backward", "backward_scaled", "row_sums", "update_rows"),
}


class Wrapped:
    """Methods of objects that were replaced by others around them, until :meth:`undo`."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace a method of an object by a function around it."""
        self._replaced.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, around)

    def undo(self) -> None:
        """Give the objects their own methods again."""
        for owner, name, before in reversed(self._replaced):
            delattr(owner, name)
            if before is not None:
                setattr(owner, name, before)
        self._replaced.clear()


class KernelClock:
    """Seconds that the kernels of a collection take on this rank.

    Args:
        lookups: the lookups of its kernel groups; they report to this clock until :meth:`stop`.

    Attributes:
        spent: seconds of each group's lookups and of its updates, group after group.
    """

    def __init__(self, lookups: Sequence[Any]) -> None:
        self.spent = [0.0] * (2 * len(lookups))
        self._wrapped, self._is_inside, self._lookups = Wrapped(), False, lookups
        for group, lookup in enumerate(lookups):
            for kind, names in _CALLS.items():
                for name in names:
                    self._wrapped.put(lookup, name, self._timed(getattr(lookup, name), 2 * group + kind))

    def around(self, name: str, make: Callable[[int, Callable[[], Any]], Callable[[], Any]]) -> None:
        """Replace a method of those lookups that have it, by what is made of the group's number and the method."""
        for group, lookup in enumerate(self._lookups):
            if hasattr(lookup, name):
                self._wrapped.put(lookup, name, make(group, getattr(lookup, name)))

    def start(self) -> None:
        """Begin at 0."""
        self.spent[:] = [0.0] * len(self.spent)

    def stop(self) -> None:
        """Leave the lookups alone."""
        self._wrapped.undo()

    def total(self, kind: int) -> float:
        """Seconds of all groups' lookups, or updates."""
        return sum(self.spent[kind::2])

    def _timed(self, inner: Callable[..., Any], place: int) -> Callable[..., Any]:
        clock, spent = time.perf_counter, self.spent

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:  # a call inside a call is counted already
                return inner(*args, **kwargs)
            self._is_inside, start = True, clock()
            try:
                return inner(*args, **kwargs)
            finally:
                spent[place] += clock() - start
                self._is_inside = False

        return call
