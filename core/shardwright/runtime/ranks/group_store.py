"""A process group's store, every call of which ends in time.

torch's stores may wait for their server without a limit. A ``TCPStore`` waits, whatever its time-out, for bytes of a
connection that a stopped process keeps open. A ``FileStore`` waits for a lock that a stopped process holds. So each
call is made on a thread of its own, which is left behind when time is up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from shardwright.runtime.ranks.lockstep import name_ranks
from shardwright.runtime.ranks.processes import Neighbours
from shardwright.runtime.ranks.store_log import get_all

T = TypeVar("T")

_LEAST_S = 0.25  # time that every call gets, so that a busy processor alone does not fail it
_ALIVE_S = 0.5  # a longer wait checks that the other processes live
_SHORTEST_NAP_S, _LONGEST_NAP_S, _LONGER = 0.5e-3, 0.05, 1.3


class StoreError(RuntimeError):
    """The store did not answer, or not in time."""


class GroupStore:
    """The store of a process group, one object for all its users in this process; made by :meth:`of`.

    Args:
        store: torch's store, with the group's own prefix.
        timeout_s: time-out of the group's collectives, s.
        neighbours: processes of the group's ranks on this host.
        names: numbers of the group's ranks in the job; their ranks in the group by default.

    Attributes:
        timeout_s: time-out of the group's collectives, s.
    """

    _known: WeakKeyDictionary[Any, GroupStore] = WeakKeyDictionary()

    def __init__(
        self, store: Any, timeout_s: float, neighbours: Neighbours, names: Sequence[int] | None = None
    ) -> None:
        self._store, self.timeout_s, self._neighbours = store, timeout_s, neighbours
        self._names = names
        self._is_introduced = False
        self._left_behind: threading.Thread | None = None

    @classmethod
    def of(cls, process_group: Any) -> GroupStore:
        """The store object of a process group."""
        known = cls._known.get(process_group)
        if known is None:
            neighbours = Neighbours(dist.get_rank(process_group), dist.get_world_size(process_group))
            timeout_s, names = _timeout_of(process_group), dist.get_process_group_ranks(process_group)
            known = cls(store_of(process_group), timeout_s.total_seconds(), neighbours, names)
            cls._known[process_group] = known
        return known

    def ask(self, question: Callable[[Any], T], deadline: float) -> T:
        """Call ``question`` with torch's store, and return its result.

        Args:
            question: function that calls the store, without waiting for other ranks.
            deadline: latest end on the monotonic clock, s; a quarter of a second is always given.

        Raises:
            StoreError: the store did not answer in time, or its server is gone.
        """
        started = time.monotonic()
        end = started + min(max(deadline - started, _LEAST_S), self.timeout_s)
        if self._left_behind is not None:  # an unanswered call holds the connection: wait for its end
            self._left_behind.join(end - started)
        if self._left_behind is None or not self._left_behind.is_alive():
            call = _StoreRequest(partial(self._answer, question), self._store)
            self._left_behind = call.thread
            call.thread.join(max(end - time.monotonic(), 0.0))
            if not call.thread.is_alive():
                self._left_behind = None
                return call.result()
        waited_s = time.monotonic() - started
        raise StoreError(f"the process group's store has given no answer for {waited_s:.1f} s; {_WHO}")

    def _answer(self, question: Callable[[Any], T], store: Any) -> T:
        """Call the question; before the first, write this process's number into the store."""
        if not self._is_introduced:
            self._neighbours.introduce(store)
            self._is_introduced = True
        return question(store)

    def set(self, key: str, value: str, deadline: float) -> None:
        """Set the value of a key; raises as :meth:`ask`."""
        self.ask(lambda store: store.set(key, value), deadline)

    def add(self, key: str, number: int, deadline: float) -> int:
        """Add to a number, 0 at first, and return it; raises as :meth:`ask`."""
        return self.ask(lambda store: int(store.add(key, number)), deadline)

    def find(self, key: str, deadline: float) -> str | None:
        """Read the value of a key, or ``None`` if it has none; raises as :meth:`ask`."""
        return self.ask(lambda store: store.get(key).decode() if store.check([key]) else None, deadline)

    def read(
        self, keys: Sequence[str], deadline: float, look: Callable[[], None] = lambda: None
    ) -> list[str]:
        """Wait until other ranks have set all keys, and read their values.

        Args:
            keys: names of the keys.
            deadline: latest end on the monotonic clock, s.
            look: function called from time to time; an error that it raises ends the wait.

        Raises:
            StoreError: the store did not answer in time, as in :meth:`ask`.
            RuntimeError: not all keys were set in time, or the process of a rank on this host has ended.
        """
        started, reason = time.monotonic(), ""
        deadline = min(deadline, started + self.timeout_s)
        for nap_s in _naps():
            told = self.ask(lambda store: get_all(store, keys) if store.check(list(keys)) else None, deadline)
            if told is not None:
                return told
            look()
            if reason:  # which was so before the keys were last looked for
                raise RuntimeError(reason)
            reason = self._reason_to_end(started, deadline)
            time.sleep(nap_s)
        raise AssertionError("naps have no end")

    def ended(self, deadline: float) -> str:
        """Name the ranks of this host whose processes have ended; empty for none. Raises as :meth:`ask`."""
        ended = self.ask(self._neighbours.ended, deadline)
        named = name_ranks([self._names[rank] if self._names else rank for rank in ended])
        return f"the process of {named} has ended" if ended else ""

    def _reason_to_end(self, started: float, deadline: float) -> str:
        """The reason to stop waiting: a process ended, or time is up; empty if there is none."""
        waited_s = time.monotonic() - started
        if waited_s > _ALIVE_S and (ended := self.ended(deadline)):
            return ended
        if time.monotonic() > deadline:
            return f"what was to come through the store had not come after {waited_s:.1f} s"
        return ""


_WHO = "the process that serves it (rank 0's, or the launcher's) may be stopped, or have ended"


def _naps() -> Iterator[float]:
    """Yield the seconds between two looks, ever longer."""
    nap_s = _SHORTEST_NAP_S
    while True:
        yield nap_s
        nap_s = min(nap_s * _LONGER, _LONGEST_NAP_S)


class _StoreRequest(Generic[T]):
    """A call of the store on a thread of its own, which nobody has to wait for."""

    def __init__(self, question: Callable[[Any], T], store: Any) -> None:
        self._question, self._store = question, store
        self._answer: list[T] = []
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="store", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._answer.append(self._question(self._store))
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        """Return the call's result, or raise its error."""
        if isinstance(self._error, RuntimeError):  # as torch's errors of stores are
            reason = str(self._error).split("\n", 1)[0]
            raise StoreError(f"the process group's store does not answer ({reason}); {_WHO}") from self._error
        if self._error is not None:
            raise self._error
        return self._answer[0]


def store_of(process_group: Any) -> Any:
    """The store of a process group, as torch has it, with the group's own prefix. torch has no public way to it."""
    return dist.distributed_c10d._world.pg_map[process_group][1]


def _timeout_of(process_group: Any) -> timedelta:
    """Time-out of the group's collectives; torch's default if its backends have none."""
    for device in process_group._device_types:
        options: Any = getattr(process_group._get_backend(device), "options", None)
        if hasattr(options, "_timeout"):
            timeout: timedelta = options._timeout
            return timeout
    return dist.distributed_c10d.default_pg_timeout
