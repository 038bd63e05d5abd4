"""The timer of experiments, by a clock that moves only where a test moves it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shardwright_plugins.commands.calibrate import kernels
from shardwright_plugins.commands.calibrate.kernels import KernelCase
from shardwright_plugins.measuring import timing


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def passes(self, seconds: float) -> Any:
        def work(*_: Any, **__: Any) -> tuple[None, None]:
            self.now_s += seconds
            return None, None

        return work


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    own = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: own.now_s)
    return own


def test_timer_tells_the_lower_quartile_of_each_part_without_what_is_before_and_the_first_rounds(
    clock: Clock,
) -> None:
    seconds = iter([9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0])  # the first two warm up
    found = timing.quartiles_ms(
        lambda: clock.passes(next(seconds))(), clock.passes(0.25), rounds=5, before=clock.passes(100)
    )
    assert found == pytest.approx([2000, 250])


class Lookups:
    """Lookups that take 2 s, their updates 3 s and 4 s."""

    def __init__(self, clock: Clock) -> None:
        self.forward, self.anticipate, self.backward = clock.passes(2), clock.passes(3), clock.passes(4)


def test_times_of_a_kernel_are_without_the_draw_of_its_ids(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def batches(case: KernelCase) -> Iterator[None]:
        while True:
            clock.passes(100)()
            yield None

    monkeypatch.setattr(kernels, "_batches", batches)
    monkeypatch.setattr(kernels.dist, "barrier", lambda: None)
    case = KernelCase(1, 10, 4, 2, 1)
    assert kernels._times(Lookups(clock), case, torch.zeros(1), 3) == pytest.approx((2000, 7000))  # type: ignore[arg-type]


def test_fixed_work_is_measured_with_memory_kept_as_that_of_experiments_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []

    def timed(*_: Any, **__: Any) -> list[float]:
        made.append("measured")
        return [2.5]

    monkeypatch.setattr(timing, "keep_memory", lambda: made.append("kept"))
    monkeypatch.setattr(timing, "quartiles_ms", timed)
    monkeypatch.setattr(timing.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(timing.dist, "all_reduce", lambda *_, **__: None)
    assert timing.reference_ms() == 2.5
    assert made == ["kept", "measured"]
