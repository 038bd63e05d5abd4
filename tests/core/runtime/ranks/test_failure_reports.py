"""Who is missing after a failure, among hundreds of ranks: each asks little, and no healthy one is blamed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from shardwright.runtime.ranks import failure_reports, group_store
from shardwright.runtime.ranks.failure_reports import FailureReports
from shardwright.runtime.ranks.group_store import GroupStore
from shardwright.runtime.ranks.processes import Neighbours
from shardwright.runtime.ranks.store_log import LogReader, write_line

TIMEOUT_S = 60.0


class Direct(GroupStore):
    """Asks its store on the rank's own thread: a thread of each of hundreds of ranks for each question is too much."""

    def ask(self, question: Callable[[Any], Any], deadline: float) -> Any:
        return question(self._store)


class Counting:
    """A store that counts the requests made of it."""

    def __init__(self, store: Any) -> None:
        self._store, self.num_requests = store, 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self.num_requests += 1
        return getattr(self._store, name)  # type: ignore[no-any-return]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int, Any], FailureReports]:
    """Makes the roll call of one rank among many."""

    def make(rank: int, world_size: int, store: Any) -> FailureReports:
        own = Direct(store, TIMEOUT_S, Neighbours(rank, world_size))
        with (
            mock.patch.object(dist, "get_rank", return_value=rank),
            mock.patch.object(dist, "get_world_size", return_value=world_size),
            mock.patch.object(dist, "get_process_group_ranks", return_value=list(range(world_size))),
            mock.patch.object(group_store.GroupStore, "of", return_value=own),
        ):
            return FailureReports(mock.Mock(spec=dist.ProcessGroup))

    monkeypatch.setattr(failure_reports, "listen", lambda _: None)
    return make


def called(
    group: Callable[[int, int, Any], FailureReports], world_size: int, dead: set[int]
) -> tuple[dict[int, str], list[int]]:
    """What each rank that lives says after a failure, and the requests of each."""
    shared = dist.HashStore()
    stores = {rank: Counting(shared) for rank in range(world_size) if rank not in dead}
    grace_s = 2.0 if world_size <= 128 else 5.0  # which is waited out
    with mock.patch.object(failure_reports, "_LONGEST_GRACE_S", grace_s):
        rolls = {rank: group(rank, world_size, store) for rank, store in stores.items()}
    texts: dict[int, str] = {}

    all_started = threading.Barrier(len(rolls))

    def fail(rank: int) -> None:
        all_started.wait(TIMEOUT_S)
        texts[rank] = str(rolls[rank].failure("it", RuntimeError("closed"), time.monotonic()))

    threads = [threading.Thread(target=fail, args=(rank,)) for rank in rolls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    return texts, [store.num_requests for store in stores.values()]


@pytest.mark.parametrize("world_size", [128, pytest.param(512, marks=pytest.mark.slow)])
def test_hundreds_of_ranks_find_the_one_that_is_missing_with_a_few_requests_each(group, world_size):
    missing = world_size // 2 + 1
    texts, requests = called(group, world_size, {missing})
    assert len(texts) == world_size - 1
    for rank, text in texts.items():
        assert text.startswith(f"rank {rank}: it failed: no word from rank {missing} in "), text
    assert sum(requests) < 300 * len(requests)  # each asking for each, again and again, would be thousands


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [64, 512])
def test_missing_ranks_that_are_many_are_not_each_asked_for(group, world_size):
    _, requests = called(group, world_size, set(range(2, world_size)))
    assert max(requests) < 500  # of 17 looks at most, whatever the load; each for all would be more than 600


def test_roll_is_called_to_its_end_as_soon_as_all_have_answered(group):
    texts, requests = called(group, 64, set())
    assert len(texts) == 64
    assert not any("no word" in text for text in texts.values())
    assert all("failed in it" in text for text in texts.values())
    assert sum(requests) < 300 * len(requests)


def test_log_is_read_past_a_line_that_its_rank_did_not_live_to_write():
    store = dist.HashStore()
    log = LogReader("log")
    write_line(store, "log", "one")
    store.add("log", 1)
    write_line(store, "log", "three")
    assert log.read_on(store) == []  # rank may be just about to write
    assert log.read_on(store) == ["one", "three"]
    store.set("log/2", "two")
    assert log.read_on(store) == ["two"]
    assert log.read_on(store) == []


def test_meeting_is_left_by_rank_0_last_since_its_process_may_serve_the_store(group) -> None:
    store, events = dist.HashStore(), list[str]()
    rolls = [group(rank, 3, store) for rank in range(3)]
    slow = rolls[2]._store.read

    def read_late(*args: Any, **kwargs: Any) -> list[str]:
        time.sleep(0.5)
        answer = slow(*args, **kwargs)
        events.append("rank 2 has read")
        return answer

    rolls[2]._store.read = read_late

    def meet(rank: int) -> None:
        rolls[rank].meet("place", "it", lambda: None)
        events.append(f"rank {rank} has left")

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert events.index("rank 1 has left") < events.index("rank 2 has read") < events.index("rank 0 has left")
    assert [store.check([f"shardwright/meeting/place{end}"]) for end in ("", "/all", "/gone")] == [False] * 3


def test_report_before_a_collective_that_all_came_to_is_of_no_lost_rank(group) -> None:
    """A failure that all survived says nothing of the collective that is under way now."""
    store = dist.HashStore()
    reports, now = group(0, 2, store), time.time()
    write_line(store, failure_reports._LOG, f"1 {now - 30.0} ids")
    assert reports.lost(now - 10.0) == ""
    assert reports.lost(now - 40.0) == "rank 1 failed in ids"
    write_line(store, failure_reports._LOG, f"1 {now - 9.0} results")
    assert reports.lost(now - 10.0) == "rank 1 failed in results"
