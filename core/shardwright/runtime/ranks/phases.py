"""Phases that all ranks of a process group end well, or all fail: connecting, planning, sharding.

An error on one rank alone would leave the others waiting for it. So that rank writes its error into the group's store.
The others look there while they wait, and raise it too. At the end of a phase all wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from shardwright.errors import DistributedError, ShardwrightError
from shardwright.runtime.ranks.failure_reports import LONGEST_WORD, FailureReports
from shardwright.runtime.ranks.group_store import GroupStore, StoreError

_LOOK_S = 0.25  # time between two looks for another rank's failure
_TELL_S = 0.5  # time to write a failure
_NO_STORE = (StoreError, dist.DistError)  # torch's own calls of the store raise the latter


class Phases:
    """The phases of a process group, as one rank goes through them; made by :meth:`of`.

    Args:
        process_group: the group.

    Attributes:
        failure_reports: exchange of reports after a collective failed.
        timeout_s: time-out of the group's collectives, s.
    """

    _known: WeakKeyDictionary[Any, Phases] = WeakKeyDictionary()

    def __init__(self, process_group: Any) -> None:
        self.failure_reports = FailureReports(process_group)
        self._store = GroupStore.of(process_group)
        self.timeout_s = self._store.timeout_s
        self._rank, self._world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self._what = self._place = ""
        self._failed_elsewhere = False

    @classmethod
    def of(cls, process_group: Any) -> Phases:
        """The phases object of a process group."""
        known = cls._known.get(process_group)
        if known is None:
            known = cls._known[process_group] = cls(process_group)
        return known

    @contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """A context for work of every rank; inside another phase, it is part of that one.

        Args:
            what: name of the work, for the error.

        Raises:
            DistributedError: another rank failed (the error has its text), or did not reach the end in time (the error
                has its number).
        """
        if self._what or self._world_size == 1:
            yield
            return
        self._what, self._place, self._failed_elsewhere = what, "", False
        try:
            self._place = self._enter()
            yield
            with self.named(what):
                self.failure_reports.meet(self._place, what, self.look)
        except BaseException as error:
            self._tell(error)
            if isinstance(error, _NO_STORE):
                raise DistributedError(f"rank {self.failure_reports.name}: {what} failed: {error}") from error
            raise
        finally:
            self._what = ""

    def _enter(self) -> str:
        """Name the phase's place in the store, by a count in the store, because keys there outlive the group."""
        number = self._store.add(
            f"shardwright/phases/{self._rank}", 1, time.monotonic() + self._store.timeout_s
        )
        return f"phase/{number}"

    def _tell(self, error: BaseException) -> None:
        """Tell the others that this rank failed, unless it failed because another failed or was lost."""
        was_lost = isinstance(error, DistributedError) and isinstance(error.__cause__, RuntimeError)
        if self._failed_elsewhere or was_lost or isinstance(error, _NO_STORE) or not self._place:
            return
        text = f"rank {self.failure_reports.name} raised {type(error).__name__}: {error}"[:LONGEST_WORD]
        try:
            self._store.set(self._failure_key, text, time.monotonic() + _TELL_S)
        except StoreError:  # then the others wait until time is up
            return

    @property
    def _failure_key(self) -> str:
        return f"shardwright/{self._place}/failed"

    def look(self) -> None:
        """Check that no other rank failed in the current phase, if there is one.

        Raises:
            DistributedError: another rank failed.
        """
        if not self._what:
            return
        try:
            told = self._store.find(self._failure_key, time.monotonic() + _LOOK_S)
        except StoreError:  # what is waited for may come all the same
            return
        if told is not None:
            self._failed_elsewhere = True
            raise DistributedError(f"rank {self.failure_reports.name}: {self._what} failed: {told}")

    def wait(self, work: Any, patience: timedelta) -> Any:
        """Wait for a collective of torch; in a phase, at most until another rank fails."""
        deadline = time.monotonic() + patience.total_seconds()
        while self._what and time.monotonic() < deadline - _LOOK_S:
            if _is_done(work, _LOOK_S):
                break
            self._look_again(work)
        return work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))

    def _look_again(self, work: Any) -> None:
        try:
            self.look()
        except DistributedError:
            if not _is_done(work, _LOOK_S):  # what it sent before it failed comes first
                raise

    def named(self, collective: str, since: float | None = None) -> Named:
        """A context whose errors are raised as failures of that collective.

        Args:
            collective: name of the collective.
            since: time of its start on the monotonic clock, s; now by default.
        """
        return Named(self.failure, collective, since)

    def failure(self, collective: str, error: RuntimeError, since: float) -> DistributedError:
        """Make the error of a failed collective: another rank's failure in this phase, or the failure reports."""
        try:
            self.look()
        except DistributedError as told:
            return told
        return self.failure_reports.failure(collective, error, since)


class Named:
    """A context that gives errors inside it the name of a collective. Every step enters several: it must be quick."""

    def __init__(
        self,
        failure: Callable[[str, RuntimeError, float], DistributedError],
        collective: str,
        since: float | None,
    ) -> None:
        self._failure, self._collective = failure, collective
        self._since = time.monotonic() if since is None else since

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, RuntimeError) and not isinstance(
            error, ShardwrightError
        ):  # which says what it is
            raise self._failure(self._collective, error, self._since) from error


def _is_done(work: Any, within_s: float) -> bool:
    """Wait at most ``within_s`` seconds for a collective of torch; true if it ended. Raises its error if it failed."""
    try:
        work.wait(timedelta(seconds=within_s))
    except RuntimeError:
        if work.is_completed():
            raise
        return False
    return True
