"""Work on one rank while the others wait, on simulated ranks whose collectives have short time-outs."""

from __future__ import annotations

import time

import pytest

from shardwright.errors import NoPlanError, PlanError, PlanningError
from shardwright.planning.watch import Watch
from shardwright.runtime.ranks.collective_planning import on_one_rank
from shardwright_testing.simulated import run_simulated


def run(work, *, timeout_s=60.0, watches=None):
    def on_rank(env):
        watch = watches[env.rank] if watches else Watch()
        try:
            return on_one_rank(env, work, watch, to_text=str, from_text=int, beat_s=0.05)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    return run_simulated(on_rank, 3, timeout_s=timeout_s)


def test_on_one_rank_gives_every_rank_what_rank_0_made():
    asked = []

    def work(env, watch):
        asked.append(env.rank)
        return 42

    assert run(work) == [42, 42, 42]
    assert asked == [0]


def test_on_one_rank_others_wait_longer_than_the_time_out_of_a_collective():
    def work(env, watch):
        time.sleep(3.0)
        return 7

    assert run(work, timeout_s=2.0) == [7, 7, 7]


def test_on_one_rank_error_of_ours_is_the_same_on_every_rank():
    def work(env, watch):
        raise NoPlanError("no plan: 3 GiB are short")

    assert run(work) == ["NoPlanError: no plan: 3 GiB are short"] * 3


def test_on_one_rank_other_errors_reach_the_others_by_name():
    def work(env, watch):
        raise ZeroDivisionError("by zero")

    own, *others = run(work)
    assert own == "ZeroDivisionError: by zero"
    assert others == ["PlanningError: planning failed on rank 0: ZeroDivisionError: by zero"] * 2


def test_on_one_rank_result_that_cannot_be_written_is_an_error_on_every_rank():
    def on_rank(env):
        def to_text(value):
            raise PlanningError("cannot be written")

        try:
            return on_one_rank(env, lambda env, watch: 1, Watch(), to_text=to_text, from_text=int)
        except PlanningError as error:
            return str(error)

    assert run_simulated(on_rank, 2) == ["cannot be written"] * 2


def test_on_one_rank_result_that_cannot_be_read_is_the_same_error_on_every_rank():
    def on_rank(env):
        def from_text(text):
            raise PlanError("cannot be read")

        try:
            return on_one_rank(env, lambda env, watch: 1, Watch(), to_text=str, from_text=from_text)
        except PlanningError as error:
            return str(error)

    assert run_simulated(on_rank, 3) == ["what was made on rank 0 cannot be read again: cannot be read"] * 3


def test_on_one_rank_interrupt_reaches_the_work_and_the_others_get_its_result():
    watches = [Watch(), Watch(), Watch()]

    def work(env, watch):
        deadline = time.monotonic() + 60
        while not watch.is_over and time.monotonic() < deadline:
            time.sleep(0.01)
            watches[0].was_interrupted = True  # what the handler of Ctrl-C does, on rank 0
        return 5 if watch.is_over else -1

    assert run(work, watches=watches) == [5, 5, 5]


def test_on_one_rank_interrupt_of_the_waiting_thread_reaches_the_others_as_an_error(monkeypatch):
    from shardwright.runtime.ranks import collective_planning

    def interrupted(self, wait_s):
        raise KeyboardInterrupt

    monkeypatch.setattr(collective_planning._Task, "is_done", interrupted)

    def on_rank(env):
        try:
            return on_one_rank(env, lambda env, watch: 1, Watch(), to_text=str, from_text=int)
        except BaseException as error:
            return f"{type(error).__name__}: {error}"

    own, other = run_simulated(on_rank, 2)
    assert own == "KeyboardInterrupt: "
    assert other == "PlanningError: planning failed on rank 0: KeyboardInterrupt: "


@pytest.mark.parametrize("world_size", [1, 4])
def test_on_one_rank_of_any_number(world_size):
    results = run_simulated(
        lambda env: on_one_rank(env, lambda env, watch: 3, Watch(), to_text=str, from_text=int), world_size
    )
    assert results == [3] * world_size
