"""Reports after a failed collective: the ranks that failed in it as well, and the ranks that sent no report.

A backend tells at most that a connection was closed, or that time ran out, but not which rank is to blame. So each rank
whose collective fails writes a report into a log in the group's store, and reads the reports of others. A rank that was
killed, or is stuck elsewhere, writes none. That takes each rank a few requests, whatever the number of ranks. While
nothing fails, nothing is written or read, but for where a rank waits for the others in the store.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from shardwright.runtime.ranks.group_store import GroupStore, StoreError
from shardwright.runtime.ranks.lockstep import name_ranks
from shardwright.runtime.ranks.store_log import LogReader, write_line

_LONGEST_GRACE_S = 5.0
_LEAST_GRACE_S = 0.3  # for collectives that only torch waited for, until the group's time-out
_SHORTEST_NAP_S, _LONGEST_NAP_S, _LONGER = 0.02, 0.5, 1.5
_MOST_ASKED = 16  # ranks without a report whose keys are read one by one
SAY_S = 0.5
"""Time to write a message that nobody must read, s."""
LONGEST_TEXT = 1000
"""Characters of another rank's error that an error repeats."""
_LOG = "shardwright/roll call"


class FailureReports:
    """Exchange of reports between the ranks of a process group, through the group's store.

    Args:
        store: the group's store.
        rank: this rank.
        names: numbers of the group's ranks in the job.

    Attributes:
        grace_s: longest time that other ranks' reports are waited for, s.
        patience: longest time that a collective may take, so that reports can be exchanged within the group's time-out.
    """

    def __init__(self, store: GroupStore, rank: int, names: Sequence[int]) -> None:
        self._store, self._rank, self._names = store, rank, names
        self.grace_s = min(_LONGEST_GRACE_S, store.timeout_s / 4)
        self.patience = timedelta(seconds=store.timeout_s - self.grace_s)
        self._log, self._heard = LogReader(_LOG), list[str]()

    def say(self, store: Any, text: str, *, once: bool = False) -> None:
        """Write what this rank does or did, for ranks that wait for it in vain.

        Args:
            store: torch's store.
            text: what it does.
            once: only if it has said nothing.
        """
        said = f"{time.time()} {text[:LONGEST_TEXT]}"
        store.compare_set(_key(self._rank), "", said) if once else store.set(_key(self._rank), said)

    def unsay(self, store: Any) -> None:
        """Take back what this rank said."""
        store.delete_key(_key(self._rank))

    def after(self, collective: str, since: float) -> str:
        """Report that a collective failed here, wait for the others' reports, and summarise them.

        Args:
            collective: name of the collective.
            since: time of its start on the monotonic clock, s. Reports are waited for within the group's time-out.

        Returns:
            ``"no word from rank 1; rank 2 failed in ids"``; the store's error if it does not answer.
        """
        started = time.monotonic()
        grace_s = min(self.grace_s, max(since + self._store.timeout_s - started, _LEAST_GRACE_S))
        try:
            found = self._exchange(f"failed in {collective}", started + grace_s)
        except StoreError as error:  # the rank that serves the store is gone, or stuck, too
            return str(error)
        missing = [rank for rank in self._others if rank not in found]
        parts = [f"no word from {self._named(missing)} in {grace_s:.1f} s"] if missing else []
        for text in dict.fromkeys(found.values()):
            parts.append(f"{self._named([rank for rank in found if found[rank] == text])} {text}")
        return "; ".join(parts)

    def lost(self, since: float) -> str:
        """The reason to believe that another rank will not come to a collective under way; empty for none.

        Its process on this host has ended, or it has reported a failure.

        Args:
            since: time when this rank began the last collective that all ranks came to, s since the epoch. Ranks that
                reported before, by more than the grace for clocks that differ, have gone on.
        """
        deadline = time.monotonic() + SAY_S
        try:
            ended = self._store.ended(deadline)
            self._heard += self._store.ask(self._log.read_on, deadline)
        except StoreError:  # what is waited for may come all the same
            return ""
        reports = dict.fromkeys(_reports_since(since - self.grace_s, self._heard))
        failed = [f"{self._named([rank])} {text}" for rank, text in reports if rank != self._rank]
        return ended or "; ".join(failed)

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(len(self._names)) if rank != self._rank]

    def _named(self, ranks: Sequence[int]) -> str:
        """Name ranks of the group by their numbers in the job."""
        return name_ranks([self._names[rank] for rank in ranks])

    def _exchange(self, mine: str, deadline: float) -> dict[int, str]:
        """Write this rank's report and read the others', until all have said something or time is up.

        Returns:
            What each rank said that said something of late.
        """

        def report(store: Any) -> None:  # into the log, which all read, and under a key, which some ask for
            self.say(store, mine)
            write_line(store, _LOG, f"{self._rank} {time.time()} {mine}")

        self._store.ask(report, deadline)
        log, found = LogReader(_LOG), dict[int, str]()
        oldest, nap_s = time.time() - 2 * self._store.timeout_s, _SHORTEST_NAP_S
        while True:
            is_late = time.monotonic() > deadline
            lines = self._store.ask(log.read_on, deadline)
            found |= dict(_reports_since(oldest, lines))
            if is_late or not lines:  # those that are still missing may be elsewhere, and say so
                missing = [rank for rank in self._others if rank not in found][:_MOST_ASKED]
                found |= _reports_since(oldest, self._store.ask(partial(_said, missing), deadline))
            found.pop(self._rank, None)
            if is_late or len(found) == len(self._others):
                return dict(sorted(found.items()))
            time.sleep(min(nap_s, max(deadline - time.monotonic(), 0.0)))
            nap_s = min(nap_s * _LONGER, _LONGEST_NAP_S)


def _reports_since(oldest: float, lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield the ranks and texts of reports, those written before a time left out."""
    for line in lines:
        rank, when, text = line.split(" ", 2)
        if float(when) > oldest:
            yield int(rank), text


def _said(ranks: Sequence[int], store: Any) -> list[str]:
    """Read what ranks say under their keys, of those that say something, as lines of the log."""
    return [f"{rank} {store.get(_key(rank)).decode()}" for rank in ranks if store.check([_key(rank)])]


def _key(rank: int) -> str:
    return f"shardwright/said/{rank}"
