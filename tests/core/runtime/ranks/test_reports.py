"""Who is missing after a failure, among hundreds of ranks: each asks little, and no healthy one is blamed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from shardwright.runtime.ranks import group_store
from shardwright.runtime.ranks.group_store import GroupStore

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


def reports_of(rank: int, world_size: int, store: Any) -> GroupStore:
    """The reports of one rank among many."""
    return Direct(store, TIMEOUT_S, rank, range(world_size))


def called(world_size: int, dead: set[int]) -> tuple[dict[int, str], list[int]]:
    """What each rank that lives says after a failure, and the requests of each."""
    shared = dist.HashStore()
    stores = {rank: Counting(shared) for rank in range(world_size) if rank not in dead}
    grace_s = 2.0 if world_size <= 128 else 5.0  # which is waited out
    with mock.patch.object(group_store, "_LONGEST_GRACE_S", grace_s):
        rolls = {rank: reports_of(rank, world_size, store) for rank, store in stores.items()}
    texts: dict[int, str] = {}

    all_started = threading.Barrier(len(rolls))

    def fail(rank: int) -> None:
        all_started.wait(TIMEOUT_S)
        texts[rank] = rolls[rank].after("it", time.monotonic())

    threads = [threading.Thread(target=fail, args=(rank,)) for rank in rolls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    return texts, [store.num_requests for store in stores.values()]


@pytest.mark.parametrize("world_size", [128, pytest.param(512, marks=pytest.mark.slow)])
def test_hundreds_of_ranks_find_the_one_that_is_missing_with_a_few_requests_each(world_size):
    missing = world_size // 2 + 1
    texts, requests = called(world_size, {missing})
    assert len(texts) == world_size - 1
    for rank, text in texts.items():
        assert text.startswith(f"no word from rank {missing} in "), (rank, text)
    assert sum(requests) < 300 * len(requests)  # each asking for each, again and again, would be thousands


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [64, 512])
def test_missing_ranks_that_are_many_are_not_each_asked_for(world_size):
    _, requests = called(world_size, set(range(2, world_size)))
    assert max(requests) < 500  # of 17 looks at most, whatever the load; each for all would be more than 600


def test_log_is_read_past_a_line_that_its_rank_did_not_live_to_write() -> None:
    store = dist.HashStore()
    ranks = [reports_of(rank, 3, store) for rank in range(3)]
    ranks[1].report("failed in ids", time.monotonic())
    store.add("shardwright/failures", 1)
    ranks[2].report("failed in ids", time.monotonic())
    ranks[0].lost(time.time())
    assert ranks[0].lost(time.time()) == "ranks 1, 2 failed in ids"


def test_ranks_that_wait_at_one_place_are_told_together() -> None:
    store = dist.HashStore()
    with mock.patch.object(group_store, "_LONGEST_GRACE_S", 0.5):
        reports, *others = (reports_of(rank, 3, store) for rank in range(3))
    for other in others:
        other.waits(store, "a place")
    assert reports.after("it", time.monotonic()) == "ranks 1, 2 waited in a place"
