"""Progress and limits of a long search: how good it is so far, and when it is to end."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from attrs import Factory, define, field, frozen

# A limit is meant for the search: the options, without which there is no plan at all, may take so long in any case.
_PREPARATION_S = 1.0


class OutOfTime(BaseException):
    """Ends work that has nothing to return when its watch is over; no error of a plugin's, so not an `Exception`."""


@frozen
class Progress:
    """Progress of a search.

    Args:
        seconds: since it began.
        value_ms: the objective of the best plan so far; infinite while there is none.
        lower_bound_ms: value that no plan can be better than; 0 while nothing is proven.

    Example:
        >>> import shardwright as sw
        >>> seen = []
        >>> planner = sw.EmbeddingShardingPlanner(sw.Topology(2, "cuda"), batch_size=512, listener=seen.append)
        >>> plan = planner.plan_tables([sw.TableSpec("user", 1_000_000, 64, ["user"])])
        >>> all(one.lower_bound_ms <= one.value_ms for one in seen)
        True
    """

    seconds: float
    value_ms: float = math.inf
    lower_bound_ms: float = 0.0

    @property
    def gap(self) -> float:
        """Largest excess of the best plan over the bound, in parts of it; infinite while it is not known."""
        return gap_of(self.value_ms, self.lower_bound_ms)


def gap_of(value_ms: float, lower_bound_ms: float) -> float:
    """``value / bound - 1``; infinite where nothing is proven."""
    if not math.isfinite(value_ms) or lower_bound_ms <= 0:
        return 0.0 if value_ms == 0 else math.inf
    return max(0.0, value_ms / lower_bound_ms - 1)


class Listener(Protocol):
    """Callable that is told about progress."""

    def __call__(self, progress: Progress, /) -> None:
        """Called on the thread that searches, whenever value or bound change."""


@define(eq=False)
class Watch:
    """Keeps the time and the work of a search, passes on its progress, and ends it early.

    A search calls :meth:`tell` when its best value or its bound improve, and looks at :attr:`is_over` in every loop
    that can last; when that is true, it returns what it has. A long search counts its work with :meth:`spend`: a
    limit of work, unlike one of time, gives the same plan on any machine.

    Args:
        seconds: limit of time, s; no limit by default.
        listener: called with the progress.
        work_us: limit of work, in microseconds of an ordinary core; no limit by default.
        clock: function that tells the time, s.
        outer: the watch of a search that this one is part of: work counts there too, and when that is over, so is this.
    """

    seconds: float | None = None
    listener: Listener | None = None
    work_us: float = math.inf
    clock: Callable[[], float] = time.monotonic
    outer: Watch | None = None
    was_interrupted: bool = field(default=False, init=False)
    """True if somebody asked for an end with Ctrl-C."""
    spent_us: float = field(default=0.0, init=False)
    """The work that was done so far, as it was counted."""
    _start: float = field(default=Factory(lambda self: self.clock(), takes_self=True), init=False)
    _value_ms: float = field(default=math.inf, init=False)
    _lower_bound_ms: float = field(default=0.0, init=False)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return self.clock() - self._start

    @property
    def seconds_left(self) -> float:
        """Time until the limit, s; infinite without one."""
        own = math.inf if self.seconds is None else max(0.0, self.seconds - self.elapsed_s)
        return own if self.outer is None else min(own, self.outer.seconds_left)

    @property
    def is_over(self) -> bool:
        """True if the search is to return what it has."""
        is_late = self.seconds is not None and self.elapsed_s >= self.seconds
        is_done = self.was_interrupted or is_late or self.spent_us >= self.work_us
        return is_done or (self.outer is not None and self.outer.is_over)

    def spend(self, work_us: float) -> None:
        """Count some work: microseconds that it takes an ordinary core, computed from the sizes of the problem."""
        self.spent_us += work_us
        if self.outer is not None:
            self.outer.spend(work_us)

    def share(self, of_all: float) -> Watch:
        """A watch of a part of the search, which may use a part of the time and the work that is left.

        This watch is notified of plans that are found, too. It is not notified of bounds: what is proven of a part
        may not hold for all.
        """
        seconds = None if self.seconds is None else self.seconds_left * of_all
        work_us = (self.work_us - self.spent_us) * of_all
        return Watch(seconds, lambda told: self.tell(value_ms=told.value_ms), work_us, self.clock, outer=self)

    def go_on(self) -> None:
        """Return, unless the watch is over: for work that has nothing to return yet.

        Raises:
            OutOfTime: it is over, or was interrupted.
        """
        if self.was_interrupted or (self.is_over and self.elapsed_s >= _PREPARATION_S):
            raise OutOfTime

    @property
    def progress(self) -> Progress:
        """The best progress so far."""
        return Progress(self.elapsed_s, self._value_ms, self._lower_bound_ms)

    def tell(self, *, value_ms: float = math.inf, lower_bound_ms: float = 0.0) -> None:
        """Note a plan's value or a proven bound; who listens hears of it if it is better than what was known."""
        if value_ms >= self._value_ms and lower_bound_ms <= self._lower_bound_ms:
            return
        self._value_ms = min(self._value_ms, value_ms)
        self._lower_bound_ms = max(self._lower_bound_ms, lower_bound_ms)
        if self.listener is not None:
            self.listener(self.progress)

    @contextmanager
    def interruptible(self) -> Iterator[Watch]:
        """Within this, Ctrl-C ends the search politely; a second one raises ``KeyboardInterrupt`` as usual.

        Signals reach Python's main thread only, and a handler that somebody else installed is left alone: in these
        cases nothing changes.
        """
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        ):
            yield self
            return
        previous = signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, previous)

    def _on_interrupt(self, number: int, frame: Any) -> None:
        if self.was_interrupted:
            signal.default_int_handler(number, frame)
        self.was_interrupted = True
