"""What goes wrong before training: one rank's error is all ranks', and a store that does not answer is one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

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
            kind = error.partition(":")[0]
            kind = kind if kind.endswith(("InputError", "DistributedError")) else "DistributedError"
            told = f"{kind}: rank {rank}: {what} failed: rank {VICTIM} raised {error}"
            assert text.startswith(told), text


def test_group_serves_again_after_a_rank_failed_before_its_first_collective(pool: RankPool) -> None:
    assert pool.run(setup_workers.try_again, 3) == ["nothing was raised"] * 3


def test_group_is_closed_after_a_rank_failed_that_others_waited_for_in_a_collective(pool: RankPool) -> None:
    texts = pool.run(setup_workers.wait_after_a_failure, 3)
    assert all(texts[rank].startswith("RuntimeError: ") for rank in (0, 2)), texts


ENDED = "rank 1 ended with KeyError: 'no such column'"


def test_error_that_ends_a_process_of_multiprocessing_is_told_to_those_that_wait_for_it(
    tmp_path: Path,
) -> None:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    store = str(tmp_path / "store")
    others = context.Process(target=setup_workers.end_with_an_error, args=(VICTIM, store))
    own = context.Process(target=setup_workers.send, args=(theirs, setup_workers.end_with_an_error, 0, store))
    for process in (others, own):
        process.start()
    assert ours.poll(120)
    assert ENDED in ours.recv()
    for process in (others, own):
        process.join(60)
    assert others.exitcode == 1


@pytest.mark.slow
def test_error_that_ends_a_program_is_told_to_those_that_wait_for_it(tmp_path: Path) -> None:
    script = (
        "import sys; from tests.distributed.failures import setup_workers; "
        "print(setup_workers.end_with_an_error(int(sys.argv[1]), sys.argv[2]))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["", *sys.path])}
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    texts = [program.communicate(timeout=200)[0] for program in programs]
    assert ENDED in texts[0]
    assert programs[VICTIM].returncode == 1


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
