"""A process group's store: every call ends in time, whatever torch's store does."""

from __future__ import annotations

import fcntl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from shardwright.runtime.ranks import group_store
from shardwright.runtime.ranks.group_store import GroupStore, StoreError, this_host

SHORT_S, FAR_OFF_S = 0.05, 30.0


class Stuck:
    """A store of torch's whose server is stopped until it is told to go on."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def set(self, key: str, value: str) -> None:
        """It takes what is sent without an answer."""

    def add(self, key: str, number: int) -> int:
        assert self.goes_on.wait(FAR_OFF_S)
        return number


def soon() -> float:
    return time.monotonic() + SHORT_S


def later() -> float:
    return time.monotonic() + FAR_OFF_S


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    store = Stuck()
    yield store
    store.goes_on.set()


@pytest.fixture
def store() -> GroupStore:
    return GroupStore(dist.HashStore(), FAR_OFF_S, 0, [0])


def test_call_takes_no_longer_than_the_group_s_collectives(stuck: Stuck) -> None:
    with pytest.raises(StoreError, match="no answer"):
        GroupStore(stuck, SHORT_S, 0, [0]).add("count", 1, later())


def test_call_after_one_that_was_given_up_waits_for_that(stuck: Stuck) -> None:
    store = GroupStore(stuck, FAR_OFF_S, 0, [0])
    for _ in range(2):
        with pytest.raises(StoreError, match="no answer"):
            store.add("count", 1, soon())
    stuck.goes_on.set()
    assert store.add("count", 3, later()) == 3


def test_file_that_another_process_has_locked_is_given_up(tmp_path: Path) -> None:
    store = GroupStore(dist.FileStore(str(tmp_path / "store"), 1), FAR_OFF_S, 0, [0])
    store.set("a", "1", later())
    with (tmp_path / "store").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as a process has it that is stopped while it writes
        with pytest.raises(StoreError, match="no answer"):
            store.find("a", soon())
    assert store.find("a", later()) == "1"


def test_error_of_torch_s_store_says_what_it_means() -> None:
    broken = mock.Mock(add=mock.Mock(side_effect=dist.DistNetworkError("Broken pipe\nframe #0")))
    with pytest.raises(StoreError, match=r"does not answer \(Broken pipe\); the process that serves it"):
        GroupStore(broken, FAR_OFF_S, 0, [0]).add("count", 1, later())


def test_error_of_the_question_itself_is_left_as_it_is(store: GroupStore) -> None:
    with pytest.raises(ZeroDivisionError):
        store.ask(lambda _: 1 // 0, later())


def test_call_that_was_given_up_is_not_made_later(stuck: Stuck) -> None:
    store, made = GroupStore(stuck, FAR_OFF_S, 0, [0]), list[str]()
    for question in (lambda own: own.add("count", 1), lambda _: made.append("late")):
        with pytest.raises(StoreError, match="no answer"):
            store.ask(question, soon())
    stuck.goes_on.set()
    store.add("count", 1, later())
    assert made == []


def test_keys_that_do_not_come_are_an_error_in_time(store: GroupStore) -> None:
    with pytest.raises(RuntimeError, match=r"had not come after \d+\.\d s") as error:
        store.read(["key"], soon())
    assert not isinstance(error.value, StoreError)  # which answers


def introduce(store: Any, host: str, rank: int, process: int) -> None:
    """Write a rank's process into the store, as it does itself."""
    with (
        mock.patch.object(group_store, "this_host", return_value=host),
        mock.patch("os.getpid", return_value=process),
    ):
        GroupStore(store, FAR_OFF_S, rank, range(3)).add("any", 1, later())


def test_process_that_ends_ends_the_wait_for_its_keys() -> None:
    shared = dist.HashStore()
    process = subprocess.Popen(["sleep", "infinity"])
    introduce(shared, this_host(), 1, process.pid)
    store = GroupStore(shared, FAR_OFF_S, 0, range(2))

    process.kill()
    with pytest.raises(RuntimeError, match="the process of rank 1 has ended"):
        store.read(["key"], later())
    process.wait()


def test_process_that_ended_after_its_keys_were_set_is_no_error() -> None:
    shared = dist.HashStore()
    process = subprocess.Popen(["true"])
    process.wait()
    for rank, host in ((1, "another host"), (2, this_host())):
        introduce(shared, host, rank, process.pid)
    store = GroupStore(shared, FAR_OFF_S, 0, range(3))

    store.set("key", "told", later())
    assert store.read(["key"], later()) == ["told"]


def test_ranks_whose_processes_have_ended_are_not_waited_for_after_a_failure() -> None:
    shared = dist.HashStore()
    process = subprocess.Popen(["true"])
    process.wait()
    for rank in (1, 2):
        introduce(shared, this_host(), rank, process.pid)
    store = GroupStore(shared, 4 * FAR_OFF_S, 0, range(3))
    store.grace_s = FAR_OFF_S
    GroupStore(shared, FAR_OFF_S, 2, range(3)).report("raised A", later())

    started = time.monotonic()
    assert store.after("it", started) == "rank 1 has ended; rank 2 raised A"
    assert time.monotonic() - started < FAR_OFF_S


def test_all_ranks_whose_processes_have_ended_are_named_however_many_others_are_silent() -> None:
    shared, world = dist.HashStore(), 2 * group_store._MOST_ASKED
    process = subprocess.Popen(["true"])
    process.wait()
    introduce(shared, this_host(), world - 1, process.pid)
    store = GroupStore(shared, FAR_OFF_S, 0, range(world))
    store.grace_s = SHORT_S

    assert store.after("it", time.monotonic()).endswith(f"; rank {world - 1} has ended")


def test_rank_that_has_ended_and_served_the_store_is_why_others_are_not_waited_for(stuck: Stuck) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    store = GroupStore(stuck, FAR_OFF_S, 1, range(2))
    store.know({0: process.pid})

    assert store.lost(time.time()) == "the process of rank 0 has ended"


@pytest.mark.parametrize("error", [PermissionError, None])
def test_process_that_is_not_seen_but_there_has_not_ended(error: type[Exception] | None) -> None:
    with (
        mock.patch.object(group_store, "Path", side_effect=FileNotFoundError),  # what /proc hides
        mock.patch("os.kill", side_effect=error),
    ):
        assert not group_store.has_ended(2)


def test_processes_that_proc_numbers_otherwise_share_no_host() -> None:
    """A container whose /proc is its parent's: a process there would look up another's state under a rank's number."""
    with mock.patch("os.getpid", return_value=1):
        assert this_host() == "process 1"
