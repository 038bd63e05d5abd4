from __future__ import annotations

import math
import os
import signal
import threading

import pytest

from shardwright.planning.watch import Watch, gap_of


def test_watch_without_limit_is_never_over():
    assert not Watch().is_over


def test_watch_at_its_limit_is_over():
    assert Watch(seconds=0.0).is_over
    assert not Watch(seconds=1e6).is_over


def test_watch_tells_only_what_is_better():
    told: list[tuple[float, float]] = []
    watch = Watch(listener=lambda progress: told.append((progress.value_ms, progress.lower_bound_ms)))
    watch.tell(value_ms=5.0)
    watch.tell(value_ms=6.0)
    watch.tell(lower_bound_ms=2.0)
    watch.tell(lower_bound_ms=1.0, value_ms=5.0)
    watch.tell(value_ms=4.0, lower_bound_ms=1.0)
    assert told == [(5.0, 0.0), (5.0, 2.0), (4.0, 2.0)]
    assert watch.progress.gap == 1.0


def test_watch_interrupted_once_is_over_and_twice_raises():
    handler = signal.getsignal(signal.SIGINT)
    watch = Watch()
    with watch.interruptible():
        os.kill(os.getpid(), signal.SIGINT)
        assert watch.is_over
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is handler


def test_watch_leaves_the_handler_of_somebody_else_alone():
    seen: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with Watch().interruptible() as watch:
            os.kill(os.getpid(), signal.SIGINT)
        assert (seen, watch.was_interrupted) == ([signal.SIGINT], False)
    finally:
        signal.signal(signal.SIGINT, previous)


def test_watch_on_another_thread_installs_nothing():
    handler = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def work() -> None:
        with Watch().interruptible():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert seen == [handler]


@pytest.mark.parametrize(
    ("value", "bound", "gap"), [(3.0, 2.0, 0.5), (2.0, 2.0, 0.0), (2.0, 0.0, math.inf), (0.0, 0.0, 0.0)]
)
def test_gap_of(value, bound, gap):
    assert gap_of(value, bound) == gap


def test_watch_seconds_left_end_at_none_and_are_endless_without_a_limit():
    assert Watch().seconds_left == math.inf
    assert 59 < Watch(60.0).seconds_left <= 60
    assert Watch(1e-9).seconds_left == 0


def test_watch_is_over_once_its_work_is_spent():
    watch = Watch(work_us=100.0)
    watch.spend(99.0)
    assert not watch.is_over
    watch.spend(1.0)
    assert watch.is_over
    assert watch.spent_us == 100.0


def test_watch_keeps_the_time_of_its_clock():
    now = [5.0]
    watch = Watch(seconds=2.0, clock=lambda: now[0])
    now[0] = 6.5
    assert (watch.elapsed_s, watch.seconds_left, watch.is_over) == (1.5, 0.5, False)
    now[0] = 7.0
    assert watch.is_over
