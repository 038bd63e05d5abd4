"""A rank that is killed or stuck between any two collectives: the others raise, naming it and the collective."""

from __future__ import annotations

import re

import pytest
from tests.distributed.failures import faults
from tests.distributed.failures.strikes import VICTIM
from tests.distributed.failures.victims import assert_killed_rank_is_named, assert_stuck_rank_is_named, stages

from shardwright_testing.ranks import RankPool

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(("label", "sharding_type", "form"), stages("gradients"))
def test_rank_that_is_killed_is_named_by_all_others(
    pool: RankPool, label: str, sharding_type: str, form: str | None
) -> None:
    assert_killed_rank_is_named(pool, label, sharding_type, form)


@pytest.mark.parametrize(("label", "sharding_type", "form"), stages())
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


@pytest.mark.parametrize(
    "which",
    [
        "a barrier",
        pytest.param("a broadcast from rank 1", marks=pytest.mark.slow),
        pytest.param("a gathering of objects", marks=pytest.mark.slow),
        pytest.param("a broadcast of an object from rank 1", marks=pytest.mark.slow),
    ],
)
def test_rank_that_misses_another_collective_is_named(pool: RankPool, which: str) -> None:
    texts = pool.run(faults.miss_a_collective, 3, which)
    assert texts[VICTIM] == "stuck"
    for rank in (0, 2):
        assert texts[rank].startswith(f"rank {rank}: {which} failed: no word from rank 1 in "), texts[rank]
        # Not after gloo's own time-out, which leaves no time for the roll call.
        assert texts[rank].endswith("Operation timed out!"), texts[rank]


def test_roll_call_after_all_of_the_time_out_is_short(pool: RankPool) -> None:
    text = pool.run(faults.fail_late, 3)[0]
    assert text == "rank 0: it failed: no word from ranks 1, 2 in 0.3 s: it took long"


def test_rank_that_came_to_an_exchange_after_its_error_is_not_blamed_by_it(pool: RankPool) -> None:
    assert pool.run(faults.get_over_an_error, 2)[0] == "no word from rank 1 in 0.3 s"


def test_collections_called_in_different_orders_are_one_error_on_all_ranks(pool: RankPool) -> None:
    texts = set(pool.run(faults.two_collections, 4, "calls"))
    assert len(texts) == 1
    assert texts.pop().startswith(
        "step 0: the ranks make different calls: ranks 0, 2, 3: headers of the tables 't0', "
    )


def test_backward_passes_in_different_orders_are_one_error_on_all_ranks(pool: RankPool) -> None:
    texts = set(pool.run(faults.two_collections, 4, "backward passes"))
    assert len(texts) == 1
    assert texts.pop().startswith("step 1: the ranks made different calls before this batch")


@pytest.mark.slow
def test_rank_that_leaves_the_backward_pass_out_is_named_by_all_others(pool: RankPool) -> None:
    texts = dict(enumerate(pool.run(faults.two_collections, 4, "no backward pass")))
    own = texts.pop(VICTIM)
    in_headers, in_gradients = "failed in the exchange of headers", "the exchange of gradients"
    assert own.startswith("step 1: rank 1: the exchange of headers failed: "), own
    assert f"ranks 0, 2, 3 failed in {in_gradients}" in own, own
    for rank, text in texts.items():
        assert text.startswith(f"step 0: rank {rank}: {in_gradients} failed: "), text
        assert f"rank 1 {in_headers}" in text, text


def test_backward_pass_that_all_ranks_leave_out_is_no_error(pool: RankPool) -> None:
    texts = pool.run(faults.two_collections, 4, "no backward pass in the first step")
    assert set(texts) == {"nothing was raised"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "called"),
    [("state", "gathering of table 't0'")],
)
def test_state_that_one_rank_alone_asks_for_is_an_error_that_says_who_must(
    pool: RankPool, what: str, called: str
) -> None:
    texts = pool.run(faults.call_alone, 4, what)
    alone = f"{called} of the tables 't0', 't1'"
    assert texts[1].startswith(f"rank 1: {alone} failed: "), texts[1]
    for rank in (0, 2, 3):
        assert texts[rank].startswith(f"rank {rank}: the exchange of headers failed: "), texts[rank]
        assert f"rank 1 failed in {alone}" in texts[rank] or f"rank 1 waited in {alone}" in texts[rank], (
            texts[rank]
        )


@pytest.mark.slow
def test_batch_that_one_rank_cannot_make_is_told_to_those_that_wait_for_it(pool: RankPool) -> None:
    texts = pool.run(faults.call_alone, 4, "batch")
    wrong = "got 2 weights for 3 values"
    assert wrong in texts[1]
    for rank in (0, 2, 3):
        text = texts[rank]
        assert text.startswith(f"rank {rank}: the exchange of headers failed: "), text
        assert f"rank 1 raised InvalidInputError: KeyedJaggedTensor: {wrong}" in text


@pytest.mark.slow
def test_backward_pass_that_one_rank_leaves_out_after_evaluation_is_named(pool: RankPool) -> None:
    for rank, text in enumerate(pool.run(faults.evaluate_with_gradients, 4)):
        if rank == VICTIM:
            assert text.startswith("step 2: rank 1: the exchange of headers failed: "), text
            continue
        # A rank that is to get no gradient from rank 1, which had no id for it, goes on to the next batch's headers.
        in_gradients, in_headers = (
            f"step {step}: rank {rank}: the exchange of {what}"
            for step, what in ((1, "grad"), (2, "headers"))
        )
        assert text.startswith((in_gradients, in_headers)), text
        assert re.search(r"ranks? 1.* failed in the exchange of headers", text), text


@pytest.mark.parametrize("backend", [pytest.param("fake", marks=pytest.mark.slow), "gloo"])
def test_ranks_of_a_group_of_devices_talk_between_their_cpus_too(pool: RankPool, backend: str) -> None:
    told = pool.run(faults.talk_beside, 3, backend)
    assert {name for name, _, _ in told} == {"gloo"}
    assert all(ranks == [0, 1, 2] for _, ranks, _ in told)
    for rank in (0, 2):  # they hear of what fails in the group itself
        assert "rank 1 failed in another collective" in told[rank][2], told[rank][2]
