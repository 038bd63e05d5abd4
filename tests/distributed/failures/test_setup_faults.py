"""What goes wrong before training: one rank's error is all ranks', and a store that does not answer is one."""

from __future__ import annotations

import signal

import pytest
from tests.distributed.failures import setup_workers
from tests.distributed.failures.setup_workers import VICTIM

from shardwright_testing.ranks import RankPool

pytestmark = pytest.mark.distributed

FAILURES = {
    "connecting": ("connecting the ranks", "InvalidInputError: SHARDWRIGHT_SHARED_MEMORY is 'wrong'"),
    "connected": ("connecting the ranks", "DistributedError: LOCAL_WORLD_SIZE is 'wrong'"),
    "planning": ("planning", "MemoryError: no memory"),
    "sharding": ("sharding the model", "InvalidInputError: SHARDWRIGHT_INPUT_CHECKS is 'wrong'"),
    "wrapping": ("sharding the model", "OSError: no dense part"),
}


@pytest.mark.parametrize("where", FAILURES)
def test_rank_that_fails_alone_while_ranks_are_set_up_is_an_error_on_all(pool: RankPool, where: str) -> None:
    what, error = FAILURES[where]
    for rank, text in enumerate(pool.run(setup_workers.fail_alone, 3, where)):
        if rank == VICTIM:
            assert text.startswith(error), text
        else:
            told = f"DistributedError: rank {rank}: {what} failed: rank {VICTIM} raised {error}"
            assert text.startswith(told), text


def test_group_serves_again_after_a_rank_failed_before_its_first_collective(pool: RankPool) -> None:
    assert pool.run(setup_workers.try_again, 3) == ["nothing was raised"] * 3


def test_group_is_closed_after_a_rank_failed_that_others_waited_for_in_a_collective(pool: RankPool) -> None:
    texts = pool.run(setup_workers.wait_after_a_failure, 3)
    assert all(texts[rank].startswith("RuntimeError: ") for rank in (0, 2)), texts


@pytest.mark.slow
def test_error_that_ends_a_rank_is_told_to_those_that_wait_for_it(pool: RankPool) -> None:
    text = pool.run(setup_workers.end_with_an_error, 2)[0]
    assert "rank 1 failed in its program: KeyError: 'no such column'" in text


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("dtype", "'dense.2.weight' is ranks 0, 2: float32 [1, 2]; rank 1: float64 [1, 2]"),
        ("frozen", "'dense.2.bias' is ranks 0, 2: float32 [1]; rank 1: float32 [1], frozen"),
        ("missing", "'dense.2.bias' is ranks 0, 2: float32 [1]; rank 1: missing"),
        ("buffer", "'dense.2.ema' is ranks 0, 2: missing; rank 1: float32 [3]"),
    ],
)
def test_dense_part_that_differs_on_one_rank_is_an_error_that_names_it_on_all(
    pool: RankPool, how: str, what: str
) -> None:
    texts = set(pool.run(setup_workers.differ_in_the_dense_part, 3, how))
    assert len(texts) == 1
    assert what in texts.pop()


def test_dtypes_that_differ_in_a_gathering_are_an_error_on_all_ranks(pool: RankPool) -> None:
    texts = set(pool.run(setup_workers.gather_different_dtypes, 3))
    assert texts == {
        "DistributedError: the ranks gather tensors of different dtypes: ranks 0, 2: torch.float32; "
        "rank 1: torch.float64"
    }


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
@pytest.mark.parametrize(
    "before",
    [
        pytest.param("connecting", marks=pytest.mark.slow),
        pytest.param("planning", marks=pytest.mark.slow),
        pytest.param("sharding", marks=pytest.mark.slow),
        pytest.param("the first step", marks=pytest.mark.slow),
        pytest.param("the state", marks=pytest.mark.slow),
        "a roll call",
    ],
)
def test_store_that_does_not_answer_is_an_error_on_all_ranks(pool: RankPool, before: str, fault: int) -> None:
    texts = pool.run(setup_workers.lose_the_store, 2, before, fault)
    answer = "has given no answer for" if fault == signal.SIGSTOP else "does not answer ("
    for text in texts[:1] if before == "a roll call" else texts:
        assert text.startswith("DistributedError: rank "), text
        assert f"the process group's store {answer}" in text, text
