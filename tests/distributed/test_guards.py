"""Guards over loops on real ranks: what they cost, and replicas that drift."""

from __future__ import annotations

import pytest
from tests.distributed import guards_workers

from shardwright import InvalidInputError
from shardwright_plugins.guards._replicas import EVERY_VARIABLE, passes_between
from shardwright_testing.ranks import RankPool

MOST_CALLS = 40
"""Calls of Python functions a step, as promised."""


pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("update", "steps_tables"), [("in_backward", True), ("in_step", True), ("in_step", False)]
)
def test_guards_make_few_calls_a_step(pool: RankPool, update: str, steps_tables: bool) -> None:
    for counts in pool.run(guards_workers.calls_in_steps, 2, update, 9, steps_tables=steps_tables):
        # The first three look at scaled losses; the second compares replicas, in the store, as each hundredth does.
        assert 0 < max(counts[3:]) <= MOST_CALLS
        assert max(counts[0], counts[2]) <= 2 * MOST_CALLS


def test_dense_replicas_that_drift_are_an_error_with_ranks_on_all_ranks(pool: RankPool) -> None:
    (first, _), (second, _) = pool.run(guards_workers.drifting, 2, "one rank", "4", 6)
    assert first == second
    assert first.startswith("DistributedError: the ranks differ in the dense parameters in forward pass 4: ")
    assert "'over.weight' is rank 0: " in first
    assert "; rank 1: " in first


def test_dense_part_that_nobody_averages_is_named_in_a_warning(pool: RankPool) -> None:
    for text, told in pool.run(guards_workers.drifting, 2, "not averaged", "4", 6):
        assert text == "nothing was raised"
        assert len(told) == 1
        assert "in forward pass 2" in told[0]
        assert "call init_data_parallel()" in told[0]


@pytest.mark.parametrize(("how", "every"), [("", "1"), ("one rank", "0"), ("not averaged", "0")])
def test_replicas_that_are_alike_or_not_compared_train(pool: RankPool, how: str, every: str) -> None:
    assert pool.run(guards_workers.drifting, 2, how, every, 6) == [("nothing was raised", [])] * 2


@pytest.mark.parametrize("names", ["over", "sparse"])
def test_state_of_replicas_that_differs_by_rank_is_refused_on_all_ranks_before_it_is_loaded(
    pool: RankPool, names: str
) -> None:
    (first, *unchanged), second = pool.run(guards_workers.load_other, 2, names, "bits")
    assert (first, *unchanged) == second
    assert first.startswith("DistributedError: the ranks differ in load_state_dict() of ")
    assert f"'{names}" in first
    assert unchanged == [True]
    assert pool.run(guards_workers.load_other, 2, names, "none") == [("nothing was raised", False)] * 2


def test_number_of_passes_between_comparisons_is_checked() -> None:
    assert passes_between({}) == 100
    with pytest.raises(InvalidInputError, match="SHARDWRIGHT_COMPARE_REPLICAS_EVERY is 'often'"):
        passes_between({EVERY_VARIABLE: "often"})
