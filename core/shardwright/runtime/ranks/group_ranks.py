"""The ranks of a process group: what they do together goes through the group's store, where no collective is under way.

They count their meetings alike. At each, every rank adds itself, and the last one that comes writes the outcome: all
have come, with the same words or with others. A rank that fails writes its failure as the outcome of the meeting that
comes next for it. That is where the others wait, or will: while they wait for a collective, they look there as well.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, final
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary, ref

import torch.distributed as dist

from shardwright.error_reports import listen
from shardwright.errors import DistributedError, ShardwrightError
from shardwright.runtime.ranks.group_store import (
    LONGEST_TEXT,
    SAY_S,
    GroupStore,
    StoreError,
    store_of,
    timeout_of,
)
from shardwright.runtime.ranks.lockstep import Lockstep
from shardwright.runtime.ranks.together import Failure, Ranks, is_lost

_LOOK_S = 0.25  # time between two looks for another rank's failure
_NO_STORE = (StoreError, dist.DistError)  # torch's own calls of the store raise the latter
_PLACE = re.compile(r"^\[\S+:\d+\] ")  # as gloo begins its errors
_OUTCOMES = _SAME, _DIFFERENT = "same", "different"  # words of a meeting to which all came


@final
class GroupRanks(Ranks):
    """The ranks of a process group, as one of them sees them; made by :meth:`of`.

    Args:
        process_group: the group.

    Attributes:
        store: the group's store, where ranks report a collective that failed, too.
        lockstep: record of the calls that this rank makes, in order.
        timeout_s: time-out of the group's collectives, s.
        name: number of this rank in the job, by which errors name it.
        communicators: communicators of the ranks, over this group and its channels.
    """

    _known: ClassVar[WeakKeyDictionary[Any, GroupRanks]] = WeakKeyDictionary()

    def __init__(self, process_group: Any) -> None:
        self._rank, self._names = dist.get_rank(process_group), dist.get_process_group_ranks(process_group)
        self._world_size, self.name = len(self._names), self._names[self._rank]
        self.timeout_s = timeout_of(process_group).total_seconds()
        self.store = GroupStore(store_of(process_group), self.timeout_s, self._rank, self._names)
        self.lockstep = Lockstep()
        self._group, self._process = ref(process_group), os.getpid()
        self._backend = str(dist.get_backend_config(process_group))
        self._channels: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self.communicators: WeakSet[Any] = WeakSet()
        self._what, self._session, self._num_meetings = "", 0, 0
        self._is_known = False  # all ranks know why this one fails
        listen(self)

    @classmethod
    def of(cls, process_group: Any) -> GroupRanks:
        """The ranks of a process group, one object for all its users in this process."""
        if process_group not in cls._known:
            cls._known[process_group] = cls(process_group)
        return cls._known[process_group]

    def new_group(self, what: str, ranks: Iterable[int] | None = None, backend: str | None = None) -> Any:
        """Make a process group of some of the ranks, this one among them; every rank makes such a call.

        Args:
            what: name of its use, in errors.
            ranks: its ranks; all by default.
            backend: its backend; that of this group by default.
        """
        group = self._make_group(what, ranks, backend)
        # A rank that ends before it has asked the new group's store for anything is known from here.
        GroupRanks.of(group).store.know(self.store.processes(time.monotonic()))
        return group

    def _make_group(self, what: str, ranks: Iterable[int] | None, backend: str | None) -> Any:
        what = f"making a process group for {what}"
        self.meet(what)
        with self.named(what):
            return dist.new_group(
                [self._names[rank] for rank in (range(self._world_size) if ranks is None else ranks)],
                timeout=timedelta(seconds=self.timeout_s),
                backend=backend or self._backend,
                use_local_synchronization=True,  # ranks that are not in the group make no such call
            )

    def channel(self, what: str, backend: str | None = None) -> Any:
        """The process group of all ranks that carries ``what``; what fails there is reported here."""
        group = self._channels.get(what)
        if group is None:
            group = self._channels[what] = self._make_group(what, None, backend)
            self._known[group] = self
        return group

    # Meetings

    def meet(self, what: str, word: str = "") -> bool:  # noqa: D102 - described in the base class
        if self._world_size == 1:
            return True
        with self.named(what):
            return self._meet(what, _number_of(f"{what}: {word}"))

    def _meet(self, what: str, word: int) -> bool:
        since = time.monotonic()
        deadline = since + self.store.patience.total_seconds()
        place = self._place(deadline)
        self.store.ask(partial(self._come, place, what, word), deadline)
        try:
            (outcome,) = self.store.read([f"{place}/outcome"], deadline, beats=f"{place}/beats")
        except StoreError:
            raise
        except RuntimeError as error:
            with suppress(StoreError):  # the ranks may come here again
                self.store.ask(partial(self._withdraw, place, word), time.monotonic() + SAY_S)
            raise RuntimeError(f"every rank must make this call, and {error}") from None
        self._leave(place)
        if outcome not in _OUTCOMES:
            raise self._error(outcome, self._what or what)
        self.store.all_came = since
        self._is_known = outcome == _DIFFERENT
        return outcome == _SAME

    def _place(self, deadline: float) -> str:
        """Name this rank's next meeting in the store.

        Keys outlive the group there: a group that is made anew over one store counts its meetings in another session.
        """
        if not self._session:
            self._session = self.store.add(f"shardwright/session/{self._rank}", 1, deadline)
        return f"shardwright/meeting/{self._session}/{self._num_meetings}"

    def _come(self, place: str, what: str, word: int, store: Any) -> None:
        self.store.waits(store, what)
        store.add(f"{place}/words", word)
        if store.add(place, 1) == self._world_size:
            are_same = store.add(f"{place}/words", 0) == word * self._world_size
            store.compare_set(f"{place}/outcome", "", _SAME if are_same else _DIFFERENT)

    @staticmethod
    def _withdraw(place: str, word: int, store: Any) -> None:
        store.add(f"{place}/words", -word)
        store.add(place, -1)

    def _leave(self, place: str) -> None:
        """Go on to the next meeting. Rank 0 leaves last, and deletes the keys.

        Its process may serve the store, and may end while others still have to read the outcome.
        """
        self._num_meetings += 1

        def leave(store: Any) -> None:
            self.store.waits(store, "")
            if store.add(f"{place}/left", 1) == self._world_size:
                store.set(f"{place}/gone", "")

        with suppress(RuntimeError):  # what serves the store may go; one may be late, or have ended
            self.store.ask(leave, time.monotonic())
            if self._rank == 0:
                self.store.read([f"{place}/gone"], time.monotonic() + self.store.grace_s)
                keys = [place, *(f"{place}/{end}" for end in ("words", "outcome", "left", "gone", "beats"))]
                self.store.ask(lambda store: [store.delete_key(key) for key in keys], time.monotonic())

    # Work that all end well

    @contextmanager
    def together(self, what: str) -> Iterator[bool]:  # noqa: D102
        if self._what or self._world_size == 1:
            yield False
            return
        self._what, self._is_known = what, False
        try:
            yield True
            self.meet(what)
        except BaseException as error:
            self._tell(error)
            if isinstance(error, _NO_STORE):
                raise DistributedError(f"rank {self.name}: {what} failed: {error}") from error
            raise
        finally:
            self._what = ""

    def _tell(self, error: BaseException) -> None:
        """Tell the others that this rank failed, unless they know, or it failed because another was lost."""
        if self._is_known or is_lost(error) or isinstance(error, _NO_STORE):
            return
        failure = str(Failure.of(self.name, error, LONGEST_TEXT))
        with suppress(StoreError):  # then the others wait until time is up
            deadline = time.monotonic() + SAY_S
            place = self._place(deadline)
            self.store.ask(lambda store: store.compare_set(f"{place}/outcome", "", failure), deadline)
            self._leave(place)

    def _error(self, outcome: str, what: str) -> ShardwrightError:
        self._is_known = True
        return Failure.read(outcome).error(self.name, what)

    def heard(self) -> ShardwrightError | None:
        """The error of another rank that failed in the work that is done together, if there is such work."""
        if not self._what:
            return None
        deadline = time.monotonic() + _LOOK_S
        try:
            place = self._place(deadline)
            outcome = self.store.find(f"{place}/outcome", deadline)
        except StoreError:  # what is waited for may come all the same
            return None
        if outcome in (None, *_OUTCOMES):
            return None
        self._leave(place)
        return self._error(str(outcome), self._what)

    def busy(self) -> AbstractContextManager[None]:  # noqa: D102 - described in the base class
        return self.store.beating(f"{self._place(time.monotonic())}/beats")

    # Collectives

    def wait(self, work: Any, patience: timedelta) -> Any:
        """Wait for a collective of torch; in work that is done together, at most until another rank fails."""
        deadline, heard = time.monotonic() + patience.total_seconds(), None
        while self._what and (heard is not None or time.monotonic() < deadline - _LOOK_S):
            try:
                return work.wait(timedelta(seconds=_LOOK_S))
            except RuntimeError:
                if work.is_completed():  # if it ended just after that time was up, that was not its error
                    return work.wait()
            if heard is not None:  # what that rank sent before it failed has not come since
                self.close()
                raise heard
            heard = self.heard()
        return work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))

    def close(self) -> None:
        """End all collectives under way, since this rank comes to no more."""
        for communicator in list(self.communicators):
            communicator.close()

    def named(self, collective: str, since: float | None = None) -> Named:
        """A context whose errors are raised as failures of that collective.

        Args:
            collective: name of the collective.
            since: time of its start on the monotonic clock, s; now by default.
        """
        return Named(self.failure, collective, since)

    def failure(self, collective: str, error: RuntimeError, since: float) -> ShardwrightError:
        """Make the error of a failed collective: another rank's failure, or one that names the ranks not in it.

        Args:
            collective: name of the collective.
            error: error that it raised.
            since: time of its start on the monotonic clock, s.
        """
        if (heard := self.heard()) is not None:
            return heard
        became = "" if isinstance(error, StoreError) else self.store.after(collective, since)
        # Of torch's text the first sentence, without its place in a source: all of it is in the cause.
        said = _PLACE.sub("", str(error)).split("\n", 1)[0].split(". ", 1)[0]
        return DistributedError(f"rank {self.name}: {collective} failed: {became}{became and ': '}{said}")

    # Errors of this rank alone

    def hear(self, text: str, *, is_last: bool = False) -> None:
        """Report what happened to this rank.

        Args:
            text: description of that.
            is_last: its process ends with it; a report shortly before says more.
        """
        is_destroyed = self._group() not in dist.distributed_c10d._world.pg_map  # and its store may be gone
        is_forked = os.getpid() != self._process  # from the rank, which has no store there
        is_told = is_last and time.time() - self.store.last_report < self.timeout_s
        if is_destroyed or is_forked or is_told:
            return
        with suppress(StoreError):  # what is raised here is that error, not that the store is gone
            self.store.report(text, time.monotonic() + SAY_S)


class Named:
    """A context that gives errors inside it the name of a collective. Every step enters several: it must be quick.

    Attributes:
        collective: the name.
        since: time of its start on the monotonic clock, s.
    """

    def __init__(
        self,
        failure: Callable[[str, RuntimeError, float], ShardwrightError],
        collective: str,
        since: float | None,
    ) -> None:
        self._failure, self.collective = failure, collective
        self.since = time.monotonic() if since is None else since

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, RuntimeError) and not isinstance(
            error, ShardwrightError
        ):  # which says what it is
            raise self._failure(self.collective, error, self.since) from error


def _number_of(word: str) -> int:
    """Hash of a word, of so many bits that those of thousands of ranks add up in 64."""
    return int.from_bytes(hashlib.sha256(word.encode()).digest()[:6])
