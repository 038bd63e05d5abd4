"""A rank that is killed or stuck between any two collectives: the others raise, naming it and the collective."""

from __future__ import annotations

import pytest
from tests.distributed.failures import faults
from tests.distributed.failures.strikes import VICTIM

from shardwright_testing.ranks import RankError, RankPool

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
    ("sums of dense gradients", "data_parallel", "DenseForm"),
]
CARRIERS = {"messages": "gradients", "gloo": "gradients", "references": "dense gradients"}
"""What carries pieces (:func:`faults.carried_by`), with the stage before which each run kills a rank."""


def stages(*, is_killed: bool) -> list[object]:
    """All carriers and stages; but for one of each carrier, all are slow, and so is what takes a time-out."""
    return [
        pytest.param(carrier, *stage, marks=() if is_killed and stage[0] == quick else pytest.mark.slow)
        for carrier, quick in CARRIERS.items()
        for stage in STAGES
    ]


@pytest.mark.parametrize(("carrier", "label", "sharding_type", "form"), stages(is_killed=True))
def test_rank_that_is_killed_is_named_by_all_others(
    pool: RankPool, carrier: str, label: str, sharding_type: str, form: str | None
) -> None:
    with pytest.raises(RankError) as error:
        pool.run(faults.train_until, 4, label, "kill", sharding_type, form, carrier)
    assert error.value.errors == {VICTIM: "the process died"}
    assert_all_name_the_victim(error.value.results, label, f"rank {VICTIM} has ended")


@pytest.mark.parametrize(("carrier", "label", "sharding_type", "form"), stages(is_killed=False))
def test_rank_that_is_stuck_is_named_by_all_others(
    pool: RankPool, carrier: str, label: str, sharding_type: str, form: str | None
) -> None:
    texts = dict(enumerate(pool.run(faults.train_until, 4, label, "stall", sharding_type, form, carrier)))
    assert texts.pop(VICTIM).startswith("step 1: rank 1: the exchange of ")
    assert_all_name_the_victim(texts, label, f"no word from rank {VICTIM} in")


def assert_all_name_the_victim(texts: dict[int, str], label: str, why: str) -> None:
    """Each survivor raises; at least those that wait for the victim in the second step name the stage.

    A rank that is to get nothing from the victim in that step goes on to the headers of the next.
    """
    for rank, text in texts.items():
        here = f"step 1: rank {rank}: the exchange of ", f"step 2: rank {rank}: the exchange of headers "
        assert text.startswith(here), text
        assert why in text, text
    assert any(f"the exchange of {label} failed: {why}" in text for text in texts.values()), texts


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
        assert texts[rank].startswith(
            f"DistributedError: rank {rank}: {which} failed: no word from rank 1 in "
        ), texts[rank]
        # Not after gloo's own time-out, which leaves no time for the roll call.
        assert texts[rank].endswith("Operation timed out!"), texts[rank]


def test_roll_call_after_all_of_the_time_out_is_short(pool: RankPool) -> None:
    text = pool.run(faults.fail_late, 3)[0]
    assert text == "DistributedError: rank 0: it failed: no word from ranks 1, 2 in 0.3 s: it took long"


def test_rank_that_came_to_an_exchange_after_its_error_is_not_blamed_by_it(pool: RankPool) -> None:
    assert pool.run(faults.get_over_an_error, 2)[0] == "no word from rank 1 in 0.3 s"


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
def test_state_that_one_rank_alone_asks_for_is_an_error_that_says_who_must(pool: RankPool) -> None:
    texts = pool.run(faults.call_alone, 4, "state")
    alone = "gathering of table 't0' of the tables 't0', 't1'"
    assert texts[1].startswith(f"DistributedError: rank 1: {alone} failed: "), texts[1]
    for rank in (0, 2, 3):
        assert texts[rank].startswith(f"DistributedError: rank {rank}: the exchange of headers failed: "), (
            texts[rank]
        )
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
        assert text.startswith(f"DistributedError: rank {rank}: the exchange of headers failed: "), text
        assert f"rank 1 raised InvalidInputError: KeyedJaggedTensor: {wrong}" in text


@pytest.mark.parametrize("backend", [pytest.param("fake", marks=pytest.mark.slow), "gloo"])
def test_ranks_of_a_group_of_devices_talk_between_their_cpus_too(pool: RankPool, backend: str) -> None:
    told = pool.run(faults.talk_beside, 3, backend)
    assert {name for name, _, _ in told} == {"gloo"}
    assert all(ranks == [0, 1, 2] for _, ranks, _ in told)
    for rank in (0, 2):  # they hear of what fails in the group itself
        assert "rank 1 failed in another collective" in told[rank][2], told[rank][2]
