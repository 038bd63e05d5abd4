"""The watch over collectives that a device waits for, on a stand-in for the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest import mock

import pytest

from shardwright.errors import DistributedError
from shardwright_plugins.comm_backends import _device_watch as device_watch
from shardwright_plugins.comm_backends._device_watch import DeviceWatch, Marks, Query


class Stream(Marks):
    """A device that has done the first `done` things of its queue."""

    def __init__(self) -> None:
        self.queued = self.done = 0

    def put(self) -> Query:
        place = self.queued
        return lambda: self.done >= place

    def put_again(self) -> Query:
        return self.put()

    def wait(self) -> None:  # of a collective
        self.queued += 1


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, s."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(device_watch.threading, "Thread", mock.Mock())  # looks are taken by hand
    return clock


def watch_over(stream: Stream, lost: Callable[[float], str] = lambda _: "") -> tuple[DeviceWatch, mock.Mock]:
    abort = mock.Mock()

    def failure(collective: str, error: RuntimeError, since: float) -> DistributedError:
        return DistributedError(f"{collective} since {since:.0f}: {error}")

    return DeviceWatch(stream, lost, failure, abort, limit_s=10.0), abort


def test_collective_that_the_device_does_not_get_past_is_an_error_at_the_next_call(now: list[float]) -> None:
    stream = Stream()
    watch, abort = watch_over(stream)
    watch.wait("the exchange of results", stream)
    assert watch.look()
    now[0] += 10.5
    watch.check()
    assert not watch.look()
    abort.assert_called_once_with()
    for _ in range(2):  # whoever catches it gets it again
        with pytest.raises(
            DistributedError,
            match=r"^the exchange of results since 100: the device had waited for it for 10.5 s; the "
            r"device's collectives are aborted: go on from a checkpoint$",
        ):
            watch.check()


def test_lost_rank_is_noticed_before_the_time_out(now: list[float]) -> None:
    stream = Stream()
    watch, _ = watch_over(stream, lambda _: "the process of rank 1 has ended")
    watch.wait("it", stream)
    assert watch.look()
    now[0] += 1.5
    assert not watch.look()
    with pytest.raises(DistributedError, match="the process of rank 1 has ended"):
        watch.check()


def test_long_computation_before_a_collective_is_no_fault_of_another_rank(now: list[float]) -> None:
    stream = Stream()
    watch, abort = watch_over(
        stream, lambda _: "the process of rank 1 has ended"
    )  # after its last collective
    stream.queued += 1  # the computation
    watch.wait("it", stream)
    for _ in range(5):
        now[0] += 8.0
        assert watch.look()
    stream.done = 2
    assert watch.look()
    now[0] += 20.0
    assert watch.look()
    abort.assert_not_called()
    watch.check()


def test_other_collectives_of_the_device_are_an_error_at_the_limit(now: list[float]) -> None:
    stream = Stream()
    watch, _ = watch_over(stream, lambda _: "never asked")
    watch.wait("it", stream)
    stream.done = 1
    stream.queued += 1  # such as an average of gradients
    assert watch.look()
    now[0] += 9.0
    assert watch.look()
    now[0] += 9.0
    assert not watch.look()
    with pytest.raises(DistributedError, match="the device's other work since 100: the device had waited"):
        watch.check()


def test_ranks_are_asked_for_since_the_last_collective_that_all_came_to(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank whose failure was survived is not lost: it has come to a collective since."""
    clock = [5000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    asked: list[float] = []
    stream = Stream()
    watch, _ = watch_over(stream, lambda since: asked.append(since) or "")
    clock[0] = 5040.0
    watch.wait("one that ends", stream)
    stream.done = stream.queued
    assert watch.look()
    clock[0] = 5050.0
    watch.wait("one under way", stream)
    assert watch.look()
    now[0] += 2.0
    assert watch.look()
    assert asked == [5040.0]
