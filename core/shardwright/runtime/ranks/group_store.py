"""A process group's store, every call of which ends in time.

torch's stores may wait for their server without a limit. A ``TCPStore`` waits, whatever its time-out, for bytes of a
connection that a stopped process keeps open. A ``FileStore`` waits for a lock that a stopped process holds. So one
thread makes the calls, and whoever asked waits for the answer no longer than it wants to.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist

from shardwright.runtime.ranks.lockstep import name_ranks
from shardwright.runtime.ranks.processes import Process, this_host

T = TypeVar("T")

_Requests: TypeAlias = "SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]"

_LEAST_S = 0.25  # time that every call gets, so that a busy processor alone does not fail it
_ALIVE_S = 0.5  # a longer wait checks that the other processes live
_SHORTEST_NAP_S, _LONGEST_NAP_S, _LONGER = 0.5e-3, 0.05, 1.3


class StoreError(RuntimeError):
    """The store did not answer, or not in time."""


class GroupStore:
    """The store of a process group, one object for all its users in this process.

    Args:
        store: torch's store, with the group's own prefix.
        timeout_s: time-out of the group's collectives, s.
        rank: this rank.
        names: numbers of the group's ranks in the job.

    Attributes:
        timeout_s: time-out of the group's collectives, s.
    """

    def __init__(self, store: Any, timeout_s: float, rank: int, names: Sequence[int]) -> None:
        self._store, self.timeout_s = store, timeout_s
        self._rank, self._names = rank, names
        self._is_introduced, self._host = False, ""
        self._neighbours: dict[int, Process] = {}
        self._requests: _Requests = SimpleQueue()
        self._worker: threading.Thread | None = None
        weakref.finalize(
            self, self._requests.put, None
        ).atexit = False  # what is said at the end still needs it

    def ask(self, question: Callable[[Any], T], deadline: float) -> T:
        """Call ``question`` with torch's store, after all questions before it, and return its result.

        Args:
            question: function that calls the store, without waiting for other ranks.
            deadline: latest end on the monotonic clock, s; a quarter of a second is always given.

        Raises:
            StoreError: the store did not answer in time, or its server is gone.
        """
        if self._worker is None:
            self._worker = threading.Thread(target=_serve, args=(self._requests,), name="store", daemon=True)
            self._worker.start()
        started = time.monotonic()
        answer: Future[T] = Future()
        self._requests.put((answer, partial(self._answer, question)))
        try:
            return answer.result(min(max(deadline - started, _LEAST_S), self.timeout_s))
        except TimeoutError:
            answer.cancel()  # it is not made later
            waited_s = time.monotonic() - started
            raise StoreError(
                f"the process group's store has given no answer for {waited_s:.1f} s; {_WHO}"
            ) from None
        except RuntimeError as error:  # as torch's errors of stores are
            reason = str(error).split("\n", 1)[0]
            raise StoreError(f"the process group's store does not answer ({reason}); {_WHO}") from error

    def _answer(self, question: Callable[[Any], T]) -> T:
        """Call the question; before the first, write this process's number into the store, among those of its host."""
        if not self._is_introduced:
            self._is_introduced = True
            with suppress(OSError):  # no Linux: the others wait until time is up
                self._host = f"shardwright/processes/{this_host()}"
                number = self._store.add(self._host, 1)
                self._store.set(f"{self._host}/{number}", f"{self._rank} {os.getpid()}")
        return question(self._store)

    def set(self, key: str, value: str, deadline: float) -> None:
        """Set the value of a key; raises as :meth:`ask`."""
        self.ask(lambda store: store.set(key, value), deadline)

    def add(self, key: str, number: int, deadline: float) -> int:
        """Add to a number, 0 at first, and return it; raises as :meth:`ask`."""
        return self.ask(lambda store: int(store.add(key, number)), deadline)

    def find(self, key: str, deadline: float) -> str | None:
        """Read the value of a key, or ``None`` if it has none; raises as :meth:`ask`."""
        return self.ask(lambda store: store.get(key).decode() if store.check([key]) else None, deadline)

    def read(self, keys: Sequence[str], deadline: float, *, beats: str = "") -> list[str]:
        """Wait until other ranks have set all keys, and read their values.

        Args:
            keys: names of the keys.
            deadline: latest end on the monotonic clock, s.
            beats: key that a busy rank changes from time to time; with each change the wait begins anew.

        Raises:
            StoreError: the store did not answer in time, as in :meth:`ask`.
            RuntimeError: not all keys were set in time, or the process of a rank on this host has ended.
        """
        since = listened = time.monotonic()
        reason, last = "", None
        wait_s = min(deadline - since, self.timeout_s)
        for nap_s in _naps():
            told = self.ask(
                lambda store: get_all(store, keys) if store.check(list(keys)) else None, since + wait_s
            )
            if told is not None:
                return told
            if beats and time.monotonic() > listened + _ALIVE_S:
                listened, beat = time.monotonic(), self.find(beats, since + wait_s)
                if beat != last:
                    since, reason, last = listened, "", beat
            if reason:  # which was so before the keys were last looked for
                raise RuntimeError(reason)
            reason = self._reason_to_end(since, since + wait_s)
            time.sleep(nap_s)
        raise AssertionError("naps have no end")

    def ended(self, deadline: float) -> str:
        """Name the ranks of this host whose processes have ended; empty for none. Raises as :meth:`ask`."""
        ended = self.ask(self._find_ended, deadline)
        return (
            f"the process of {name_ranks([self._names[rank] for rank in ended])} has ended" if ended else ""
        )

    def _find_ended(self, store: Any) -> list[int]:
        """Find the ranks of this host whose processes have ended."""
        if self._host and len(self._neighbours) < len(self._names) - 1:
            keys = [f"{self._host}/{number + 1}" for number in range(int(store.add(self._host, 0)))]
            told = (
                map(int, text.split()) for text in get_all(store, [key for key in keys if store.check([key])])
            )
            new = {rank: number for rank, number in told if rank not in (self._rank, *self._neighbours)}
            self._neighbours |= {rank: Process(number) for rank, number in new.items()}
        return [rank for rank, process in sorted(self._neighbours.items()) if process.has_ended]

    def _reason_to_end(self, since: float, deadline: float) -> str:
        """The reason to stop waiting: a process ended, or time is up; empty if there is none."""
        waited_s = time.monotonic() - since
        if waited_s > _ALIVE_S and (ended := self.ended(deadline)):
            return ended
        if time.monotonic() > deadline:
            return f"what was to come through the store had not come after {waited_s:.1f} s"
        return ""


_WHO = "the process that serves it (rank 0's, or the launcher's) may be stopped, or have ended"


def _serve(requests: _Requests) -> None:
    """Make the calls that are asked for, one after the other, until the store is let go."""
    while (request := requests.get()) is not None:
        answer, call = request
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)
        del request, answer, call


def get_all(store: Any, keys: Sequence[str]) -> list[str]:
    """Read the values of keys that exist."""
    if not keys:
        return []
    at_once = store.has_extended_api()
    return [text.decode() for text in (store.multi_get(list(keys)) if at_once else map(store.get, keys))]


def _naps() -> Iterator[float]:
    """Yield the seconds between two looks, ever longer."""
    nap_s = _SHORTEST_NAP_S
    while True:
        yield nap_s
        nap_s = min(nap_s * _LONGER, _LONGEST_NAP_S)


def store_of(process_group: Any) -> Any:
    """The store of a process group, as torch has it, with the group's own prefix. torch has no public way to it."""
    return dist.distributed_c10d._world.pg_map[process_group][1]


def timeout_of(process_group: Any) -> timedelta:
    """Time-out of the group's collectives; torch's default if its backends have none."""
    for device in process_group._device_types:
        options: Any = getattr(process_group._get_backend(device), "options", None)
        if hasattr(options, "_timeout"):
            timeout: timedelta = options._timeout
            return timeout
    return dist.distributed_c10d.default_pg_timeout
