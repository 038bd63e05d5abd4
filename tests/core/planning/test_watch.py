from __future__ import annotations

import math
import os
import signal
import threading

import pytest

from shardwright.planning.watch import Watch, gap_of


@pytest.mark.parametrize(
    ("seconds", "is_over", "least_left", "most_left"),
    [(None, False, math.inf, math.inf), (0.0, True, 0, 0), (1e-9, True, 0, 0), (60.0, False, 59, 60)],
)
def test_watch_is_over_at_its_limit(seconds, is_over, least_left, most_left):
    watch = Watch(seconds)
    assert least_left <= watch.seconds_left <= most_left
    assert watch.is_over == is_over


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
