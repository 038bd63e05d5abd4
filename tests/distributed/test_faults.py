"""A rank that is killed or stuck between any two collectives: the others raise, naming it and the collective."""

from __future__ import annotations

import pytest
from tests.distributed import faults

from shardwright.testing.ranks import RankError, RankPool

pytestmark = pytest.mark.distributed

STAGES = [
    *((label, "row_wise", None) for label in ("headers", "ids", "results", "gradients")),
    *(
        (f"{what} {where}", "table_row_wise", None)
        for what in ("results", "gradients")
        for where in ("inside the host", "across hosts")
    ),
    ("updates of copies", "data_parallel", "BatchForm"),
    ("updates of copies", "data_parallel", "RowsForm"),
    ("dense gradients", "data_parallel", "DenseForm"),
    ("dense sums", "data_parallel", "DenseForm"),
]


def stages(*quick: str) -> list[object]:
    """All stages; those of other collectives than these, each of which takes a time-out, are slow."""
    return [pytest.param(*stage, marks=() if stage[0] in quick else pytest.mark.slow) for stage in STAGES]


def assert_all_name_the_victim(texts: dict[int, str], label: str) -> None:
    """Each survivor raises in the second step; at least those that wait for the victim name the stage."""
    for rank, text in texts.items():
        assert text.startswith(f"step 1: rank {rank}: the exchange of "), text
        assert f"no word from rank {faults.VICTIM} in" in text, text
    assert any(f"the exchange of {label} failed: no word from" in text for text in texts.values()), texts


@pytest.mark.parametrize(
    ("label", "sharding_type", "form"), stages("headers", "results across hosts", "gradients", "dense sums")
)
def test_rank_that_is_killed_is_named_by_all_others(
    pool: RankPool, label: str, sharding_type: str, form: str | None
) -> None:
    with pytest.raises(RankError) as error:
        pool.run(faults.train_until, 4, label, "kill", sharding_type, form, timeout_s=60)
    assert error.value.errors == {faults.VICTIM: "the process died"}
    assert_all_name_the_victim(error.value.results, label)


@pytest.mark.parametrize(("label", "sharding_type", "form"), stages("ids", "dense gradients"))
def test_rank_that_is_stuck_is_named_by_all_others(
    pool: RankPool, label: str, sharding_type: str, form: str | None
) -> None:
    texts = dict(
        enumerate(pool.run(faults.train_until, 4, label, "stall", sharding_type, form, timeout_s=60))
    )
    assert texts.pop(faults.VICTIM).startswith("step 1: rank 1: the exchange of ")
    assert_all_name_the_victim(texts, label)


@pytest.mark.parametrize("which", ["a barrier", "a broadcast from rank 1", "a gathering of objects"])
def test_rank_that_misses_another_collective_is_named(pool: RankPool, which: str) -> None:
    texts = pool.run(faults.miss_a_collective, 3, which, timeout_s=60)
    assert texts[faults.VICTIM] == "stuck"
    for rank in (0, 2):
        assert texts[rank].startswith(f"rank {rank}: {which} failed: no word from rank 1 in "), texts[rank]


def test_collections_called_in_different_orders_are_one_error_on_all_ranks(pool: RankPool) -> None:
    texts = set(pool.run(faults.two_collections, 4, "calls", timeout_s=60))
    assert len(texts) == 1
    assert texts.pop().startswith(
        "step 0: the ranks called different collections: ranks 0, 2, 3: the tables 't0', "
    )


def test_backward_passes_in_different_orders_are_one_error_on_all_ranks(pool: RankPool) -> None:
    texts = set(pool.run(faults.two_collections, 4, "backward passes", timeout_s=60))
    assert len(texts) == 1
    assert texts.pop().startswith("step 1: the ranks made different calls before this batch")


def test_rank_that_leaves_the_backward_pass_out_is_named_by_all_others(pool: RankPool) -> None:
    texts = dict(enumerate(pool.run(faults.two_collections, 4, "no backward pass", timeout_s=60)))
    left_out = "the start of a batch of the tables 't0', 't1' without the backward pass of the one before"
    own = texts.pop(faults.VICTIM)
    assert own.startswith(
        f"step 1: rank 1: {left_out} failed: ranks 0, 2, 3 failed in the exchange of grad"
    ), own
    for rank, text in texts.items():
        assert text.startswith(f"step 0: rank {rank}: the exchange of gradients failed: "), text
        assert f"rank 1 failed in {left_out}" in text, text


def test_backward_pass_that_all_ranks_leave_out_is_no_error(pool: RankPool) -> None:
    texts = pool.run(faults.two_collections, 4, "no backward pass in the first step", timeout_s=60)
    assert set(texts) == {"nothing was raised"}
