"""Work on the first rank while the others wait, on simulated ranks."""

from __future__ import annotations

import pytest

from shardwright.errors import DistributedError, NoPlanError
from shardwright_testing.simulated import run_simulated


def run(work, *, world_size=3):
    def on_rank(env):
        try:
            return env.on_first_rank("counting", work)
        except Exception as error:
            return error

    return run_simulated(on_rank, world_size)


@pytest.mark.parametrize("world_size", [1, 3])
def test_work_on_the_first_rank_gives_every_rank_its_result(world_size):
    asked = []

    def work():
        asked.append(1)
        return 42

    assert run(work, world_size=world_size) == [42] * world_size
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [(NoPlanError("3 GiB are short"), NoPlanError), (ZeroDivisionError("by zero"), DistributedError)],
)
def test_error_on_the_first_rank_is_of_one_class_on_every_rank_if_it_is_ours(error, kind):
    def work():
        raise error

    own, *others = run(work)
    assert own is error
    for other in others:
        assert type(other) is kind
        assert f"rank 0 raised {type(error).__name__}: {error}" in str(other)
