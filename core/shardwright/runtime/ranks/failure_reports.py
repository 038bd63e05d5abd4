"""Reports after a failed collective: the ranks that failed in it as well, and the ranks that sent no report.

A backend tells at most that a connection was closed, or that time ran out, but not which rank is to blame. So each rank
whose collective fails writes a report into a log in the group's store, and reads the reports of others. A rank that was
killed, or is stuck elsewhere, writes none. That takes each rank a few requests, whatever the number of ranks. While
nothing fails, nothing is written or read.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from shardwright.error_listeners import ErrorListener, listen
from shardwright.errors import DistributedError
from shardwright.runtime.ranks.group_store import GroupStore, StoreError
from shardwright.runtime.ranks.lockstep import name_ranks
from shardwright.runtime.ranks.store_log import LogReader, write_line

_LONGEST_GRACE_S = 5.0
_LEAST_GRACE_S = 0.3  # for collectives that only torch waited for, until the group's time-out
_SHORTEST_NAP_S, _LONGEST_NAP_S, _LONGER = 0.02, 0.5, 1.5
_MOST_ASKED = 16  # ranks without a report whose keys are read one by one
_WORD_S = 0.5  # time to write a message
LONGEST_WORD = 1000  # characters


class FailureReports(ErrorListener):
    """Exchange of failure reports between the ranks of a process group, through the group's store.

    Args:
        process_group: the group.

    Attributes:
        patience: longest time that a collective may take, so that reports can be exchanged within the group's time-out.
        timeout_s: time-out of the group's collectives, s.
        grace_s: longest time that other ranks' reports are waited for, s.
    """

    def __init__(self, process_group: Any) -> None:
        self._rank, self._world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self._names = dist.get_process_group_ranks(process_group)
        self._group, self._store = weakref.ref(process_group), GroupStore.of(process_group)
        self.timeout_s = self._store.timeout_s
        self.grace_s = min(_LONGEST_GRACE_S, self.timeout_s / 4)
        self.patience = timedelta(seconds=self.timeout_s - self.grace_s)
        self._log, self._heard = LogReader(_LOG), list[str]()
        listen(self)

    @property
    def name(self) -> int:
        """Number of this rank in the job, by which errors name it."""
        return self._names[self._rank]

    def hear(self, text: str) -> None:
        """Write an error's text into the store, for ranks that may wait for this one in vain."""
        if self._group() not in dist.distributed_c10d._world.pg_map:  # destroyed, and its store may be gone
            return
        with suppress(StoreError):  # what is raised here is that error, not that the store is gone
            word = f"{time.time()} {text[:LONGEST_WORD]}"
            self._store.set(_word_key(self._rank), word, time.monotonic() + _WORD_S)

    def failure(self, collective: str, error: RuntimeError, since: float) -> DistributedError:
        """Make the error that names the collective that failed here, and the ranks that were not in it.

        Args:
            collective: name of the collective.
            error: error that it raised.
            since: time of its start on the monotonic clock, s. Reports are waited for within the group's time-out.
        """
        became = "" if isinstance(error, StoreError) else self._after(collective, since)
        return DistributedError(f"rank {self.name}: {collective} failed: {became}{became and ': '}{error}")

    def lost(self, since: float) -> str:
        """The reason to believe that another rank will not come to a collective under way; empty for none.

        Its process on this host has ended, or it has reported a failure.

        Args:
            since: time when this rank began the last collective that all ranks came to, s since the epoch. Ranks that
                reported before, by more than the grace for clocks that differ, have gone on.
        """
        deadline = time.monotonic() + _WORD_S
        try:
            ended = self._store.ended(deadline)
            self._heard += self._store.ask(self._log.read_on, deadline)
        except StoreError:  # what is waited for may come all the same
            return ""
        reports = _reports_since(since - self.grace_s, self._heard)
        others = [(rank, said) for rank, said in reports if rank != self._rank]
        failed = [f"{self._named([rank])} failed in {said}" for rank, said in others]
        return ended or "; ".join(dict.fromkeys(failed))

    def _after(self, label: str, since: float) -> str:
        """Report that ``label`` failed here, wait for the others' reports, and summarise them.

        Returns:
            ``"no word from rank 1; rank 2 failed in ids"``; the store's error if it does not answer.
        """
        started = time.monotonic()
        grace_s = min(self.grace_s, max(since + self.timeout_s - started, _LEAST_GRACE_S))
        try:
            told = self._exchange(label, started + grace_s)
            others = [rank for rank in range(self._world_size) if rank != self._rank]
            missing = [rank for rank in others if rank not in told]
            words = self._words_of(missing, started + grace_s)
        except StoreError as error:  # the rank that serves the store is gone, or stuck, too
            return str(error)
        parts = [f"no word from {self._named(missing)} in {grace_s:.1f} s"] if missing else []
        parts += [f"{self._named([rank])} had raised {word}" for rank, word in words.items()]
        for seen in dict.fromkeys(told.values()):
            parts.append(f"{self._named([rank for rank in told if told[rank] == seen])} failed in {seen}")
        return "; ".join(parts)

    def _named(self, ranks: list[int]) -> str:
        """Name ranks of the group by their numbers in the job."""
        return name_ranks([self._names[rank] for rank in ranks])

    def _words_of(self, ranks: list[int], deadline: float) -> dict[int, str]:
        """Read the recent errors that these ranks raised of their own accord, as of a bad batch, by rank."""
        words = {}
        for rank in ranks[:_MOST_ASKED]:
            when, _, text = (self._store.find(_word_key(rank), deadline) or "0").partition(" ")
            if time.time() - float(when) < 2 * self.timeout_s:
                words[rank] = text
        return words

    def meet(self, place: str, what: str, look: Callable[[], None]) -> None:
        """Wait in the store, without a collective, until every rank has come to ``place``.

        Ranks that fail elsewhere meanwhile are told of ``what``. Rank 0 leaves last, and deletes the meeting's keys.
        Its process may serve the store, and may end while others still have to read that all were here.

        Args:
            place: name of the meeting, which no other has.
            what: name of the work that is done there.
            look: function called from time to time; an error that it raises ends the wait.

        Raises:
            RuntimeError: a rank did not come in time, or the store does not answer.
        """
        count = f"shardwright/meeting/{place}"
        everybody, gone = f"{count}/all", f"{count}/gone"
        deadline = time.monotonic() + self.patience.total_seconds()

        def come(store: Any) -> None:
            store.set(_key(self._rank), what)
            if store.add(count, 1) == self._world_size:
                store.set(everybody, "here")

        def leave(store: Any) -> None:
            store.delete_key(_key(self._rank))
            if store.add(count, 1) == 2 * self._world_size:
                store.set(gone, "gone")

        self._store.ask(come, deadline)
        self._store.read([everybody], deadline, look)
        with suppress(StoreError):  # all were here: what serves the store may go
            self._store.ask(leave, time.monotonic())
        if self._rank == 0:
            with suppress(RuntimeError):  # one is late, or was ended
                self._store.read([gone], time.monotonic() + self.grace_s)
            with suppress(StoreError):
                self._store.ask(
                    lambda store: [store.delete_key(key) for key in (gone, everybody, count)], deadline
                )

    def _exchange(self, label: str, deadline: float) -> dict[int, str]:
        """Write this rank's report and read the others', until all have reported or time is up.

        Returns:
            Name of the collective that each reporting rank failed in.
        """
        self._store.ask(partial(_tell, self._rank, label), deadline)
        log, told = LogReader(_LOG), dict[int, str]()
        nap_s = _SHORTEST_NAP_S
        while True:
            is_late = time.monotonic() > deadline
            lines = self._store.ask(log.read_on, deadline)
            told |= {rank: said for rank, said in self._recent(lines) if rank != self._rank}
            if is_late or not lines:  # those that are still missing may be elsewhere, and say so
                missing = [
                    rank for rank in range(self._world_size) if rank not in told and rank != self._rank
                ]
                told |= self._store.ask(partial(_said, missing[:_MOST_ASKED]), deadline)
            if is_late or len(told) == self._world_size - 1:
                return dict(sorted(told.items()))
            time.sleep(min(nap_s, max(deadline - time.monotonic(), 0.0)))
            nap_s = min(nap_s * _LONGER, _LONGEST_NAP_S)

    def _recent(self, lines: list[str]) -> Iterator[tuple[int, str]]:
        """Yield the ranks and reports of log lines that are recent enough to be of this failure."""
        return _reports_since(time.time() - 2 * self.timeout_s, lines)


def _reports_since(oldest: float, lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield the ranks and reports of log lines, those written before a time left out."""
    for line in lines:
        rank, when, said = line.split(" ", 2)
        if float(when) > oldest:
            yield int(rank), said


def tell_at_end(error: str) -> None:
    """Report, to all process groups, that this rank's program ends with an error."""
    for group in list(dist.distributed_c10d._world.pg_map):
        key = _key(dist.get_rank(group))

        def answer(store: Any, key: str = key) -> None:
            if not store.check([key]):  # else what it failed in says more
                store.set(key, f"its program: {error[:LONGEST_WORD]}")

        with suppress(RuntimeError):  # what serves the store is gone
            GroupStore.of(group).ask(answer, time.monotonic() + _WORD_S)


def _tell(rank: int, label: str, store: Any) -> None:
    """Write a report twice: into the log, which all read, and under this rank's key, which some ask for."""
    store.set(_key(rank), label)
    write_line(store, _LOG, f"{rank} {time.time()} {label}")


def _said(ranks: list[int], store: Any) -> dict[int, str]:
    """Read the reports under these ranks' keys, of the ranks that have one."""
    return {rank: store.get(_key(rank)).decode() for rank in ranks if store.check([_key(rank)])}


_LOG = "shardwright/roll call"


def _key(rank: int) -> str:
    return f"shardwright/failed/{rank}"


def _word_key(rank: int) -> str:
    return f"shardwright/word/{rank}"
