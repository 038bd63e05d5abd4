"""The pool of real ranks: results in order, errors with the rank's traceback, no wait without an end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from multiprocessing.connection import wait
from unittest import mock

import pytest
from tests.plugins.kit import work

from shardwright_testing import ranks
from shardwright_testing.ranks import RankError, RankPool

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, backend="gloo", initializer=work.mark) as own:
        yield own


def is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def test_run_gives_results_in_rank_order_and_passes_arguments(pool):
    assert pool.run(work.place, 2) == [(0, 2, "0", "2"), (1, 2, "1", "2")]
    assert pool.run(work.add, 2, 1.5, twice=True) == [8.0, 8.0]
    assert pool.run(work.place, 1) == [(0, 1, "0", "1")]


def test_run_keeps_its_processes_and_initialises_them_once(pool):
    first = pool.run(work.process_id, 2)
    assert pool.run(work.process_id, 2) == first
    assert len({os.getpid(), *first}) == 3
    assert pool.run(work.marks, 2) == [["initialised"]] * 2


def test_run_more_ranks_than_the_pool_has_raises_with_both(pool):
    with pytest.raises(ValueError, match="3 ranks asked of a pool of 2"):
        pool.run(work.place, 3)


def test_run_error_has_the_ranks_traceback_and_the_others_results(pool):
    with pytest.raises(
        RankError, match=r"rank 1: Traceback(.|\n)*in fail_on(.|\n)*ValueError: rank 1 has a bad day"
    ) as error:
        pool.run(work.fail_on, 2, 1)
    assert set(error.value.errors) == {1}
    assert error.value.results == {0: "fine"}
    assert pool.run(work.add, 2, 0.0, twice=False) == [1.0, 1.0]


def test_run_result_that_cannot_be_pickled_is_an_error_with_the_reason(pool):
    with pytest.raises(RankError, match=r"rank 0: (.|\n)*[Pp]ickle"):
        pool.run(work.not_picklable, 2)
    assert pool.run(work.fail_on, 2, 5) == ["fine", "fine"]


def test_run_time_out_ends_the_processes_and_the_next_call_has_new_ones(pool):
    def until_rank_0_is_done(pending, timeout):
        return wait(pending, timeout if len(pending) == 1 else None)

    before = pool.run(work.process_id, 2)
    with (
        mock.patch.object(ranks, "wait", until_rank_0_is_done),
        pytest.raises(RankError, match="rank 1: did not end within 1 s and was ended") as error,
    ):
        pool.run(work.sleep_on, 2, 1, 1000.0, timeout_s=1)
    assert error.value.results == {0: "fine"}
    assert not any(is_alive(process_id) for process_id in before)
    after = pool.run(work.process_id, 2)
    assert not set(before) & set(after)


def test_run_process_that_dies_is_named_and_the_pool_can_be_used_again(pool):
    with pytest.raises(RankError) as error:
        pool.run(work.die_on, 2, 0)
    assert error.value.errors == {0: "the process died"}
    assert error.value.results == {1: "fine"}
    assert pool.run(work.fail_on, 2, 5) == ["fine", "fine"]


def test_close_ends_the_processes():
    with RankPool(1, backend="gloo") as own:
        (process_id,) = own.run(work.process_id, 1)
        assert is_alive(process_id)
    assert not is_alive(process_id)
