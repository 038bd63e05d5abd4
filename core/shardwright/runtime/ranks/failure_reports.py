"""Reports after a failed collective: the ranks that failed in it as well, and the ranks that sent no report.

A backend tells at most that a connection was closed, or that time ran out, but not which rank is to blame. So each rank
whose collective fails writes a report into a log in the group's store, and reads the reports of others. A rank that was
killed, or is stuck elsewhere, writes none. That takes each rank a few requests, whatever the number of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from shardwright.runtime.ranks.group_store import GroupStore, StoreError, get_all
from shardwright.runtime.ranks.lockstep import name_ranks

_LONGEST_GRACE_S = 5.0
_LEAST_GRACE_S = 0.3  # for collectives that only torch waited for, until the group's time-out
_SHORTEST_NAP_S, _LONGEST_NAP_S, _LONGER = 0.02, 0.5, 1.5
_MOST_ASKED = 16  # ranks without a report that are asked for one by one
SAY_S = 0.5
"""Time to write a message that nobody must read, s."""
LONGEST_TEXT = 1000
"""Characters of another rank's error that an error repeats."""
_LOG, _WAITING = "shardwright/failures", "shardwright/waiting"


class FailureReports:
    """Reports between one rank and the others of its process group.

    Args:
        store: the group's store.
        rank: this rank.
        names: numbers of the group's ranks in the job.

    Attributes:
        grace_s: longest time that other ranks' reports are waited for, s.
        patience: longest time that a collective may take, so that reports can be exchanged within the group's time-out.
        last_report: time of this rank's last report, s since the epoch.
    """

    def __init__(self, store: GroupStore, rank: int, names: Sequence[int]) -> None:
        self._store, self._rank, self._names = store, rank, names
        self._others = [other for other in range(len(names)) if other != rank]
        self.grace_s = min(_LONGEST_GRACE_S, store.timeout_s / 4)
        self.patience = timedelta(seconds=store.timeout_s - self.grace_s)
        self.last_report = 0.0
        self._count, self._log = 0, list[str]()

    def waits(self, store: Any, what: str) -> None:
        """Say where this rank waits for the others, until it is elsewhere (empty); called with torch's store."""
        key = f"{_WAITING}/{self._rank}"
        store.set(key, f"waits in {what}") if what else store.delete_key(key)

    def report(self, text: str, deadline: float) -> None:
        """Write a line into a log in the store that all ranks read, who wait for this one in vain.

        Args:
            text: description of what happened to this rank.
            deadline: latest end on the monotonic clock, s.
        """
        self.last_report = time.time()
        line = f"{self._rank} {self.last_report} {text[:LONGEST_TEXT]}"
        self._store.ask(lambda store: store.set(f"{_LOG}/{store.add(_LOG, 1)}", line), deadline)

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
            self.report(f"failed in {collective}", started + grace_s)
            found = self._await_others(started + grace_s)
        except StoreError as error:  # the rank that serves the store is gone, or stuck, too
            return str(error)
        missing = [rank for rank in self._others if rank not in found]
        silent = [f"no word from {self._named(missing)} in {grace_s:.1f} s"] if missing else []
        return "; ".join([*silent, *self._summary(found)])

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
            self._store.ask(self._read_on, deadline)
        except StoreError:  # what is waited for may come all the same
            return ""
        return ended or "; ".join(self._summary(self._reported_since(since - self.grace_s)))

    def _named(self, ranks: Sequence[int]) -> str:
        """Name ranks of the group by their numbers in the job."""
        return name_ranks([self._names[rank] for rank in ranks])

    def _summary(self, found: Mapping[int, str]) -> list[str]:
        """Texts with the ranks that said them, those that said the same together."""
        by_text: dict[str, list[int]] = {}
        for rank, text in sorted(found.items()):
            by_text.setdefault(text, []).append(rank)
        return [f"{self._named(ranks)} {text}" for text, ranks in by_text.items()]

    def _await_others(self, deadline: float) -> dict[int, str]:
        """Wait until all others have said something, or time is up; return what they said."""
        oldest, nap_s = time.time() - 2 * self._store.timeout_s, _SHORTEST_NAP_S
        while True:
            is_late = time.monotonic() > deadline
            has_news = self._store.ask(self._read_on, deadline)
            found = self._reported_since(oldest)
            if is_late or not has_news:  # those that are still missing may be elsewhere
                missing = [rank for rank in self._others if rank not in found][:_MOST_ASKED]
                found |= self._store.ask(partial(_waiting, missing), deadline)
            if is_late or len(found) == len(self._others):
                return found
            time.sleep(min(nap_s, max(deadline - time.monotonic(), 0.0)))
            nap_s = min(nap_s * _LONGER, _LONGEST_NAP_S)

    def _reported_since(self, oldest: float) -> dict[int, str]:
        """The last reports of other ranks, those before a time left out."""
        lines = (line.split(" ", 2) for line in self._log)
        return {
            int(rank): text for rank, when, text in lines if float(when) > oldest and int(rank) != self._rank
        }

    def _read_on(self, store: Any) -> bool:
        """Read the log, once no line was begun since the last look; three requests. True if there is more to read."""
        before, self._count = self._count, int(store.add(_LOG, 0))
        if self._count != before or len(self._log) == self._count:
            return self._count != before
        keys = [f"{_LOG}/{number + 1}" for number in range(self._count)]
        # A rank may have ended while it wrote.
        self._log = get_all(store, keys if store.check(keys) else [key for key in keys if store.check([key])])
        return False


def _waiting(ranks: Sequence[int], store: Any) -> dict[int, str]:
    """Find which of some ranks wait for others, and where."""
    keys = {rank: f"{_WAITING}/{rank}" for rank in ranks}
    return {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}
