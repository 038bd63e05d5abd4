"""Calls that every rank must make: a rank that is lost in one is named, and one that refuses has all raise alike."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.distributed.failures import together_workers
from tests.distributed.failures.together_workers import CALLS, REFUSALS

from shardwright_testing.ranks import RankError, RankPool

pytestmark = pytest.mark.distributed


def slow_but(values: object, *quick: str) -> list[object]:
    return [pytest.param(own, marks=() if own in quick else pytest.mark.slow) for own in values]  # type: ignore[attr-defined]


@pytest.mark.parametrize("what", slow_but(CALLS, "writing a checkpoint"))
def test_rank_that_is_killed_in_a_call_is_named_by_all_others(
    pool: RankPool, tmp_path: Path, what: str
) -> None:
    victim = CALLS[what][2]
    with pytest.raises(RankError) as error:
        pool.run(together_workers.lose_a_rank, 3, what, "kill", str(tmp_path))
    assert error.value.errors == {victim: "the process died"}
    assert_named(error.value.results, f"rank {victim} has ended")


@pytest.mark.parametrize("what", slow_but(CALLS))
def test_rank_that_is_stopped_in_a_call_is_named_by_all_others(
    pool: RankPool, tmp_path: Path, what: str
) -> None:
    victim = CALLS[what][2]
    texts = dict(enumerate(pool.run(together_workers.lose_a_rank, 3, what, "stop", str(tmp_path))))
    del texts[victim]
    assert_named(texts, f"no word from rank {victim} in ")


def test_rank_that_is_killed_before_its_first_call_in_a_new_group_is_missed_at_once(pool: RankPool) -> None:
    with pytest.raises(RankError) as error:
        pool.run(together_workers.lose_a_rank_of_a_new_group, 3)
    texts = error.value.results
    assert set(texts) == {0, 2}
    for text in texts.values():  # not that it had not come within the group's time-out
        assert text.endswith("the process of rank 1 has ended"), text


def assert_named(texts: dict[int, str], why: str) -> None:
    """All survivors raise, naming the victim."""
    for rank, text in texts.items():
        assert text.startswith(f"DistributedError: rank {rank}: "), text
        assert why in text, text
        assert "GLHF" not in text, text


@pytest.mark.parametrize("what", REFUSALS)
def test_call_that_one_rank_refuses_is_an_error_of_one_class_on_all_and_the_next_step_trains(
    pool: RankPool, tmp_path: Path, what: str
) -> None:
    told = pool.run(together_workers.refuse_on_one_rank, 3, what, str(tmp_path))
    assert {text.partition(":")[0] for text, _ in told} == {REFUSALS[what]}, told
    assert len({output for _, output in told}) == 1


def test_state_of_a_model_that_torch_refuses_on_one_rank_is_an_error_on_all(
    pool: RankPool, tmp_path: Path
) -> None:
    (first, _), (refused, _), (last, _) = pool.run(
        together_workers.refuse_on_one_rank, 3, "model: state", str(tmp_path)
    )
    assert refused.startswith("RuntimeError: ")
    for rank, text in ((0, first), (2, last)):
        assert text.startswith(
            f"DistributedError: rank {rank}: load_state_dict() failed: rank 1 raised RuntimeError: "
        )
