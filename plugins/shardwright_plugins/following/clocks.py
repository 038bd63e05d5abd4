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
        spent: seconds of each group's lookups and of its updates.
    """

    def __init__(self, lookups: Sequence[Any]) -> None:
        self.spent = [[0.0, 0.0] for _ in lookups]
        self._wrapped, self._is_inside = Wrapped(), False
        for lookup, own in zip(lookups, self.spent, strict=True):
            for kind, names in _CALLS.items():
                for name in names:
                    self._wrapped.put(lookup, name, self._timed(getattr(lookup, name), own, kind))

    def start(self) -> None:
        """Begin at 0."""
        for own in self.spent:
            own[:] = 0.0, 0.0

    def stop(self) -> None:
        """Leave the lookups alone."""
        self._wrapped.undo()

    def total(self, kind: int) -> float:
        """Seconds of all groups' lookups, or updates."""
        return sum(own[kind] for own in self.spent)

    def _timed(self, inner: Callable[..., Any], own: list[float], kind: int) -> Callable[..., Any]:
        clock = time.perf_counter

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:  # a call inside a call is counted already
                return inner(*args, **kwargs)
            self._is_inside, start = True, clock()
            try:
                return inner(*args, **kwargs)
            finally:
                own[kind] += clock() - start
                self._is_inside = False

        return call
