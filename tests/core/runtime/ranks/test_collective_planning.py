"""Work on one rank while the others wait, on simulated ranks."""

from __future__ import annotations

import time

import pytest

from shardwright.errors import DistributedError, NoPlanError, PlanError, PlanningError
from shardwright.planning.watch import Watch
from shardwright.runtime.ranks.collective_planning import on_one_rank
from shardwright_testing.simulated import run_simulated


def run(work, *, world_size=3, watches=None, to_text=str, from_text=int):
    def on_rank(env):
        watch = watches[env.rank] if watches else Watch()
        try:
            return on_one_rank(env, work, watch, to_text=to_text, from_text=from_text)
        except Exception as error:
            return error

    return run_simulated(on_rank, world_size)


@pytest.mark.parametrize("world_size", [1, 3])
def test_on_one_rank_gives_every_rank_what_rank_0_made(world_size):
    asked = []

    def work(watch):
        asked.append(watch)
        return 42

    assert run(work, world_size=world_size) == [42] * world_size
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [(NoPlanError("3 GiB are short"), NoPlanError), (ZeroDivisionError("by zero"), DistributedError)],
)
def test_on_one_rank_error_is_of_one_class_on_every_rank_if_it_is_ours(error, kind):
    def work(watch):
        raise error

    own, *others = run(work)
    assert own is error
    for other in others:
        assert type(other) is kind
        assert f"rank 0 raised {type(error).__name__}: {error}" in str(other)


@pytest.mark.parametrize("fails", ["to_text", "from_text"])
def test_on_one_rank_result_that_cannot_be_written_or_read_is_an_error_on_every_rank(fails):
    def fail(_):
        raise PlanError("no text")

    for error in run(lambda watch: 1, **{fails: fail}):
        assert type(error) is (PlanError if fails == "to_text" else PlanningError)
        assert "no text" in str(error)


def test_on_one_rank_interrupt_reaches_the_work_and_the_others_get_its_result():
    watches = [Watch(), Watch(), Watch()]

    def work(watch):
        deadline = time.monotonic() + 60
        while not watch.is_over and time.monotonic() < deadline:
            time.sleep(0.01)
            watches[0].was_interrupted = True  # what the handler of Ctrl-C does, on rank 0
        return 5 if watch.is_over else -1

    assert run(work, watches=watches) == [5, 5, 5]
