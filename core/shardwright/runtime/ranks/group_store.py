"""A process group's store, every call of which ends in time, and the reports that ranks leave there after a failure.

torch's stores may wait for their server without a limit. A ``TCPStore`` waits, whatever its time-out, for bytes of a
connection that a stopped process keeps open. A ``FileStore`` waits for a lock that a stopped process holds. So one
thread makes the calls, and whoever asked waits for the answer no longer than it wants to.

A backend tells at most that a connection was closed, or that time ran out, but not which rank is to blame. So each rank
whose collective fails writes a report into a log in the store, and reads the reports of others. A rank that was killed,
or is stuck elsewhere, writes none. That takes each rank a few requests, whatever the number of ranks.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist

from shardwright.host.fingerprint import name_ranks
from shardwright.runtime.ranks.together import by_rank

T = TypeVar("T")

_Answer: TypeAlias = "SimpleQueue[tuple[Any, BaseException | None]]"
_Requests: TypeAlias = "SimpleQueue[tuple[_Answer, list[Callable[[], Any]]] | None]"

SAY_S = 0.5
"""Time to write a message that nobody must read, s."""
LONGEST_TEXT = 1000
"""Characters of another rank's error that an error repeats."""
BEAT_S = 2.0
"""Seconds between two signs of life of a busy rank, if the group's time-out is at least four times as long."""
_LEAST_S = 0.25  # time that every call gets, so that a busy processor alone does not fail it
_ALIVE_S = 0.5  # time between two looks whether the other processes live
_SHORTEST_NAP_S, _LONGEST_NAP_S, _LONGER = 0.5e-3, 0.05, 1.3
_LONGEST_GRACE_S = 5.0
_LEAST_GRACE_S = 0.3  # for collectives that only torch waited for, until the group's time-out
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5  # between two looks at the log
_MOST_ASKED = 16  # ranks without a report that are asked for one by one
_PROCESSES, _LOG, _WAITING = "shardwright/processes", "shardwright/failures", "shardwright/waiting"
_ENDED = "has ended"


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
        grace_s: longest time that other ranks' reports are waited for, s.
        patience: longest time that a collective may take, so that reports can be exchanged within the group's time-out.
        last_report: time of this rank's last report, s since the epoch.
        all_came: start of the last collective here that all ranks came to, s, monotonic; reports before it are over.
    """

    def __init__(self, store: Any, timeout_s: float, rank: int, names: Sequence[int]) -> None:
        self._store, self.timeout_s = store, timeout_s
        self._rank, self._names = rank, names
        self._others = [other for other in range(len(names)) if other != rank]
        self.grace_s = min(_LONGEST_GRACE_S, timeout_s / 4)
        self.patience = timedelta(seconds=timeout_s - self.grace_s)
        self.last_report, self.all_came = 0.0, time.monotonic()
        self._host: str | None = None
        self._neighbours, self._log, self._num_begun = dict[int, int](), list[str](), 0
        self._requests, self._beats = SimpleQueue[Any](), list[Callable[[], Any]]()
        self._worker: threading.Thread | None = None
        # Not at exit: what is said at the end still needs it.
        weakref.finalize(self, self._requests.put, None).atexit = False

    # Requests

    def ask(self, question: Callable[[Any], T], deadline: float) -> T:
        """Call ``question`` with torch's store, after all questions before it, and return its result.

        Args:
            question: function that calls the store, without waiting for other ranks.
            deadline: latest end on the monotonic clock, s; a quarter of a second is always given.

        Raises:
            StoreError: the store did not answer in time, or its server is gone.
        """
        if self._worker is None:
            args = self._requests, self._beats, min(BEAT_S, self.timeout_s / 4)
            self._worker = threading.Thread(target=_serve, args=args, name="store", daemon=True)
            self._worker.start()
        started = time.monotonic()
        answer, request = SimpleQueue[tuple[Any, BaseException | None]](), [partial(self._answer, question)]
        self._requests.put((answer, request))
        try:
            found, error = answer.get(timeout=min(max(deadline - started, _LEAST_S), self.timeout_s))
        except Empty:
            request.clear()  # it is not made later
            reason = f"has given no answer for {time.monotonic() - started:.1f} s"
            raise StoreError(f"the process group's store {reason}; {_WHO}") from None
        if isinstance(error, RuntimeError):  # as torch's errors of stores are
            reason = str(error).split("\n", 1)[0]
            raise StoreError(f"the process group's store does not answer ({reason}); {_WHO}") from error
        if error is not None:
            raise error
        result: T = found
        return result

    def _answer(self, question: Callable[[Any], T]) -> T:
        """Call the question; before the first, write this process's number into the store, among those of its host."""
        if self._host is None:
            self._host = f"{_PROCESSES}/{this_host()}"
            _append(self._store, self._host, f"{self._rank} {os.getpid()}")
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
            beats: key that a busy rank changes from time to time; with each change the wait starts again.

        Raises:
            StoreError: the store did not answer in time, as in :meth:`ask`.
            RuntimeError: not all keys were set in time, or the process of a rank on this host has ended.
        """
        since = checked = time.monotonic()
        wait_s, nap_s = min(deadline - since, self.timeout_s), _SHORTEST_NAP_S
        reason, beat = "", None
        while True:
            if (values := self.ask(partial(_get_if_all, keys), since + wait_s)) is not None:
                return values
            if reason:  # which was so before the keys were last looked for
                raise RuntimeError(reason)
            now = time.monotonic()
            if now > min(checked + _ALIVE_S, since + wait_s):
                checked, reason = now, self.ended(since + wait_s)
                if beats and beat != (beat := self.find(beats, since + wait_s)):
                    since = now
            if not reason and now > since + wait_s:
                reason = f"what was to come through the store had not come after {now - since:.1f} s"
            time.sleep(nap_s)
            nap_s = min(nap_s * _LONGER, _LONGEST_NAP_S)

    @contextmanager
    def beating(self, key: str) -> Iterator[None]:
        """A context in which the key changes every few seconds, for ranks that wait for this one."""
        self._beats.append(partial(self._store.add, key, 1))
        with suppress(StoreError):  # the work goes on without signs of life
            self.add(key, 1, time.monotonic())
        try:
            yield
        finally:
            self._beats.clear()

    def ended(self, deadline: float) -> str:
        """Name the ranks of this host whose processes have ended; empty for none. Raises as :meth:`ask`."""
        return f"the process of {name_ranks(ended)} has ended" if (ended := self._ended(deadline)) else ""

    def _ended(self, deadline: float) -> list[int]:
        return [name for name, number in sorted(self.processes(deadline).items()) if has_ended(number)]

    def processes(self, deadline: float) -> dict[int, int]:
        """Numbers of other ranks' processes on this host, as far as known, by the ranks' numbers in the job.

        A rank is known here once it has asked this store for something. Raises as :meth:`ask`.
        """
        if self._host and len(self._neighbours) < len(self._others):
            lines = self.ask(partial(_lines, self._host), deadline)
            found = ((int(rank), int(number)) for rank, number in map(str.split, lines))
            self._neighbours |= {self._names[rank]: number for rank, number in found if rank != self._rank}
        return self._neighbours

    def know(self, processes: Mapping[int, int]) -> None:
        """Add process numbers, as from :meth:`processes` of a larger group's store."""
        self._neighbours |= {name: number for name, number in processes.items() if name in self._names}

    # Reports

    def waits(self, store: Any, what: str) -> None:
        """Say where this rank waits for the others, until it is elsewhere (empty); called with torch's store."""
        key = f"{_WAITING}/{self._rank}"
        store.set(key, f"waited in {what}") if what else store.delete_key(key)

    def report(self, text: str, deadline: float) -> None:
        """Write a line into a log in the store that all ranks read, who wait for this one in vain.

        Args:
            text: description of what happened to this rank.
            deadline: latest end on the monotonic clock, s.
        """
        self.last_report = time.time()
        line = f"{self._rank} {self.last_report} {text[:LONGEST_TEXT]}"
        self.ask(lambda store: _append(store, _LOG, line), deadline)

    def after(self, collective: str, since: float) -> str:
        """Report that a collective failed here, wait for the others' reports, and summarise them.

        Args:
            collective: name of the collective.
            since: time of its start on the monotonic clock, s. Reports are waited for within the group's time-out.

        Returns:
            ``"no word from rank 1; rank 2 failed in ids"``; the store's error if it does not answer.
        """
        started = time.monotonic()
        grace_s = min(self.grace_s, max(since + self.timeout_s - started, _LEAST_GRACE_S))
        try:
            self.report(f"failed in {collective}", started + grace_s)
            found = self._await_others(started + grace_s)
        except StoreError as error:  # the rank that serves the store is gone, or stuck, too
            return str(error)
        missing = [self._names[rank] for rank in self._others if rank not in found]
        silent = f"no word from {name_ranks(missing)} in {grace_s:.1f} s" if missing else ""
        return "; ".join(filter(None, (silent, self._summary(found))))

    def lost(self, since: float) -> str:
        """The reason to believe that another rank will not come to a collective under way; empty for none.

        Its process on this host has ended, or it has reported a failure.

        Args:
            since: time when this rank began the last collective that all ranks came to, s since the epoch.
        """
        deadline, ended = time.monotonic() + SAY_S, ""
        try:
            ended = self.ended(deadline)
            self.ask(self._read_on, deadline)
        except StoreError:  # what is waited for may come all the same, but for a process that ended
            return ended
        return ended or self._summary(self._reported_since(since))

    def _summary(self, found: dict[int, str]) -> str:
        """Texts with the ranks that said them, those that said the same together, and ranks that ended first."""
        ranks = sorted(found, key=lambda rank: (found[rank] != _ENDED, rank))
        return by_rank([found[rank] for rank in ranks], [self._names[rank] for rank in ranks], between=" ")

    def _await_others(self, deadline: float) -> dict[int, str]:
        """Wait until all others have said something or ended, or time is up; return what they said or became."""
        since, pause_s = time.time() - (time.monotonic() - self.all_came), _SHORTEST_PAUSE_S
        while True:
            is_late = time.monotonic() > deadline
            ended = self._ended(deadline)  # what they reported before is read after
            has_news = self.ask(self._read_on, deadline)
            found = self._reported_since(since)
            if is_late or not has_news:  # those that are still missing may be elsewhere
                found = {rank: _ENDED for rank in self._others if self._names[rank] in ended} | found
                missing = [rank for rank in self._others if rank not in found][:_MOST_ASKED]
                found |= self.ask(partial(_waiting, missing), deadline)
            if is_late or len(found) == len(self._others):
                return found
            time.sleep(min(pause_s, max(deadline - time.monotonic(), 0.0)))
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)

    def _reported_since(self, since: float) -> dict[int, str]:
        """The last reports of other ranks after a time, s since the epoch, with a grace for clocks that differ."""
        lines = (line.split(" ", 2) for line in self._log)
        return {
            int(rank): text
            for rank, when, text in lines
            if float(when) > since - self.grace_s and int(rank) != self._rank
        }

    def _read_on(self, store: Any) -> bool:
        """Read the log, once no line was begun since the last look; three requests. True if there is more to read."""
        before, self._num_begun = self._num_begun, int(store.add(_LOG, 0))
        if self._num_begun == before and len(self._log) < before:
            self._log = _lines(_LOG, store)
        return self._num_begun != before


_WHO = "the process that serves it (rank 0's, or the launcher's) may be stopped, or have ended"


def _serve(requests: _Requests, beats: Sequence[Callable[[], Any]], beat_s: float) -> None:
    """Make the calls that are asked for, one after the other, until the store is let go; beat while there are none."""
    while True:
        try:
            request = requests.get(timeout=beat_s if beats else None)
        except Empty:
            for beat in list(beats):
                with suppress(RuntimeError):  # as torch's errors of stores are
                    beat()
            continue
        if request is None:
            return
        answer, calls = request
        with suppress(IndexError):  # it was given up
            call = calls.pop()
            try:
                answer.put((call(), None))
            except BaseException as error:
                answer.put((None, error))
            del call
        del request, answer, calls


def _append(store: Any, log: str, line: str) -> None:
    """Add a line to a log of all ranks."""
    store.set(f"{log}/{store.add(log, 1)}", line)


def _lines(log: str, store: Any) -> list[str]:
    """Read the lines of a log; a rank may have ended while it wrote one."""
    keys = [f"{log}/{number + 1}" for number in range(int(store.add(log, 0)))]
    lines = _get_if_all(keys, store)
    return _get_all([key for key in keys if store.check([key])], store) if lines is None else lines


def _get_if_all(keys: Sequence[str], store: Any) -> list[str] | None:
    """Read the values of keys; ``None`` if some are not set."""
    return _get_all(keys, store) if not keys or store.check(list(keys)) else None


def _get_all(keys: Sequence[str], store: Any) -> list[str]:
    """Read the values of keys that exist."""
    at_once = keys and store.has_extended_api()
    return [text.decode() for text in (store.multi_get(list(keys)) if at_once else map(store.get, keys))]


def _waiting(ranks: Sequence[int], store: Any) -> dict[int, str]:
    """Find which of some ranks wait for others, and where."""
    keys = {rank: f"{_WAITING}/{rank}" for rank in ranks}
    return {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}


def this_host() -> str:
    """Identify the host and PID namespace: the same text for processes that can see each other.

    Where the system is not Linux, or ``/proc`` numbers the processes of another namespace, it is one for each process:
    the others wait until time is up.
    """
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            raise FileNotFoundError("/proc numbers this process otherwise than itself does")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"process {os.getpid()}"


def has_ended(process: int) -> bool:
    """Tell whether a process of this host has ended, by its number. One that nobody has waited for yet has, too.

    One that only ``/proc`` does not show, because it is another user's or of another namespace, has not.
    """
    try:
        with Path(f"/proc/{process}/stat").open("rb", buffering=0) as file:  # a text takes six times as long
            return file.read().rpartition(b") ")[2][:1] in b"ZX"
    except (FileNotFoundError, ProcessLookupError):
        return not _is_there(process)


def _is_there(process: int) -> bool:
    """Tell whether a process has a number, whether or not it can be seen."""
    try:
        os.kill(process, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


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
