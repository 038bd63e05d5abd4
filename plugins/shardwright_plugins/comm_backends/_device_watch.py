"""A watch over collectives that a device waits for, so that a lost rank has a name there too.

Between CPUs the host waits for a collective, and has its error. A collective of a device makes the device's stream
wait: the host goes on, until it needs a value and waits for the device, which waits for the lost rank. torch's
watchdog of NCCL then ends the process at the group's time-out, and tells no rank. So a thread looks at marks in the
stream, one before each wait and one behind it. When the device does not get from one to the other, because a process
has ended, another rank reports a failure, or time is nearly up, the ranks exchange their reports, the device's
collectives are aborted so that the host comes free, and the next call raises the error.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from attrs import define, field

from shardwright.errors import DistributedError, ShardwrightError
from shardwright.runtime.ranks.group_ranks import GroupRanks
from shardwright_plugins.comm_backends.torch_communicator import CollectiveWatch

Query: TypeAlias = Callable[[], bool]
"""Tells whether the device has passed a mark."""

_LOOK_S = 0.25
"""Time between two looks at the marks."""

_ASK_S = 1.0
"""Wait of a device after which the store is asked for lost ranks; collectives take milliseconds."""

_MARGIN = 1.5
"""Part of the grace that reports are given that the watch ends before torch's own watchdog does."""


@define(eq=False)
class _Wait:
    """One wait of the device's stream.

    Args:
        label: collective that is waited for.
        is_reached: tells whether the device has come to the wait.
        is_passed: tells whether it has gone on.
        begun: time when the host began it, s since the epoch.
        since: time when it was seen to have come, on the monotonic clock, s.
    """

    label: str
    is_reached: Query
    is_passed: Query
    begun: float = field(factory=lambda: time.time(), init=False)
    since: float | None = None

    def waited_s(self, now: float) -> float:
        """Seconds that the device has been seen in this wait."""
        if self.since is None:
            self.since = now if self.is_reached() else None
        return 0.0 if self.since is None else now - self.since


class Marks(ABC):
    """Marks in the stream of work of a device."""

    @abstractmethod
    def put(self) -> Query:
        """Put a mark at the present end of this thread's current stream, and return the query for it."""

    @abstractmethod
    def put_again(self) -> Query:
        """Put a mark, from any thread, into the stream where the last one was put."""


class DeviceWatch(CollectiveWatch):
    """A watch over the collectives of one process group's device; see the module.

    Args:
        marks: marks in the device's stream.
        lost: returns the reason to believe that a rank will not come, given the time when the last collective that all
            came to began, s since the epoch; empty for none.
        failure: makes the error of a failed collective, as :meth:`GroupRanks.failure`.
        abort: ends the device's collectives, so that the host no longer waits for them.
        limit_s: longest time that the device may wait for a collective, s.
    """

    def __init__(
        self,
        marks: Marks,
        lost: Callable[[float], str],
        failure: Callable[[str, RuntimeError, float], ShardwrightError],
        abort: Callable[[], None],
        limit_s: float,
    ) -> None:
        self._marks, self._lost, self._failure, self._abort = marks, lost, failure, abort
        self._limit_s = limit_s
        self._waits: deque[_Wait] = deque()
        self._all_came = time.time()
        self._pulse: _Wait | None = None
        self._thread: threading.Thread | None = None
        self._error: tuple[str, RuntimeError] | None = None

    @classmethod
    def of(cls, process_group: Any, device: torch.device) -> DeviceWatch:
        """Make the watch of a group's collectives on an accelerator of torch.

        Args:
            process_group: the group.
            device: the accelerator.
        """
        ranks = GroupRanks.of(process_group)
        group = weakref.ref(process_group)

        def abort() -> None:
            if (alive := group()) is not None:
                alive._get_backend(device).abort()

        return cls(
            marks=StreamMarks(device),
            lost=ranks.store.lost,
            failure=ranks.failure,
            abort=abort,
            limit_s=ranks.timeout_s - _MARGIN * ranks.store.grace_s,
        )

    def check(self) -> None:
        """Raise the error of the collective that did not end, if one did not.

        Raises:
            DistributedError: the device waited for a rank in vain.
        """
        if self._error is not None:
            text, cause = self._error
            raise DistributedError(text) from cause

    def wait(self, label: str, work: Any) -> Any:
        """Make the device wait for a collective, between two marks."""
        before = self._marks.put()
        result = work.wait()
        self._waits.append(_Wait(label, before, self._marks.put()))
        if self._thread is None:
            self._thread = threading.Thread(
                target=_look_on, args=(weakref.ref(self),), name="device watch", daemon=True
            )
            self._thread.start()
        return result

    def look(self) -> bool:
        """Look at the marks once.

        Returns:
            False if the watch is over: a collective has failed.
        """
        now = time.monotonic()
        while self._waits and self._waits[0].is_passed():
            self._all_came = self._waits.popleft().begun
        if self._waits:
            wait = self._waits[0]
            return self._goes_on(wait, wait.waited_s(now), asks=True)
        return self._beat(now)

    def _beat(self, now: float) -> bool:
        """Look at the stream's end: what stands there is not ours, such as the dense part's average of gradients."""
        if self._pulse is None or self._pulse.is_passed():
            self._pulse = _Wait("the device's other work", lambda: True, self._marks.put_again())
        return self._goes_on(self._pulse, self._pulse.waited_s(now), asks=False)

    def _goes_on(self, wait: _Wait, waited_s: float, *, asks: bool) -> bool:
        reason = self._lost(self._all_came) if asks and waited_s > _ASK_S else ""
        if not reason and waited_s > self._limit_s:
            reason = f"the device had waited for it for {waited_s:.1f} s"
        if not reason or wait.is_passed():  # it may have come while the store was asked
            return True
        cause = RuntimeError(reason)
        told = self._failure(wait.label, cause, time.monotonic() - waited_s)
        self._error = (f"{told}; the device's collectives are aborted: go on from a checkpoint", cause)
        self._abort()
        return False


class StreamMarks(Marks):
    """Marks in an accelerator's stream: events of the device.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None

    def put(self) -> Query:
        self._stream = torch.accelerator.current_stream(self._device)
        return self.put_again()

    def put_again(self) -> Query:
        event: Query = self._stream.record_event().query
        return event


def _look_on(watch: weakref.ref[DeviceWatch]) -> None:
    """Look at the marks until the watch is over, or nobody has it any more."""
    while (own := watch()) is not None:
        try:
            goes_on = own.look()
        except (
            torch.AcceleratorError
        ):  # the device itself has failed, which the host will be told where it waits
            return
        if not goes_on:
            return
        del own
        time.sleep(_LOOK_S)
