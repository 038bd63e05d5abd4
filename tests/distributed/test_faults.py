"""A rank that is killed or stuck between any two collectives: the others raise, naming it and the collective."""

from __future__ import annotations

import pytest
from tests.distributed import faults
from tests.distributed.victims import assert_killed_rank_is_named, assert_stuck_rank_is_named, stages

from shardwright.testing.ranks import RankPool

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("label", "sharding_type", "form"), stages("headers", "results across hosts", "gradients", "dense sums")
)
def test_rank_that_is_killed_is_named_by_all_others(
    pool: RankPool, label: str, sharding_type: str, form: str | None
) -> None:
    assert_killed_rank_is_named(pool, label, sharding_type, form)


@pytest.mark.parametrize(("label", "sharding_type", "form"), stages("ids", "dense gradients"))
def test_rank_that_is_stuck_is_named_by_all_others(
    pool: RankPool, label: str, sharding_type: str, form: str | None
) -> None:
    assert_stuck_rank_is_named(pool, label, sharding_type, form)


@pytest.mark.parametrize(("label", "sharding_type", "form"), stages("gradients"))
def test_rank_that_is_killed_is_named_by_all_others_over_gloo(
    pool: RankPool, label: str, sharding_type: str, form: str | None
) -> None:
    assert_killed_rank_is_named(pool, label, sharding_type, form, "gloo")


@pytest.mark.parametrize(("label", "sharding_type", "form"), stages())
def test_rank_that_is_stuck_is_named_by_all_others_over_gloo(
    pool: RankPool, label: str, sharding_type: str, form: str | None
) -> None:
    assert_stuck_rank_is_named(pool, label, sharding_type, form, "gloo")


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
