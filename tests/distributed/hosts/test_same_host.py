"""Large pieces between ranks of one host, through shared memory: what arrives is what was sent, come what may."""

from __future__ import annotations

import pytest
from tests.distributed.hosts import forked_sender, memory_workers
from tests.distributed.test_training import TYPES
from tests.equality import Case, Table, assert_equals_unsharded
from tests.plugins.training.test_equality import tables_of
from tests.programs import printed_by

from shardwright_plugins.comm_backends import _same_host as same_host
from shardwright_testing.equality.training import NUM_STEPS
from shardwright_testing.ranks import RankError, RankPool

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not same_host.is_possible(), reason="this system goes by gloo"),
]

MOST_SEGMENTS = (
    24  # three exchanges under way to two peers, who may be three behind; once more when they have grown
)


@pytest.mark.parametrize("how", ["copied", "read in place", "from its room"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_pieces_of_any_size_arrive_and_memory_is_used_again(
    pool: RankPool, world_size: int, how: str
) -> None:
    results = pool.run(memory_workers.exchange_all, world_size, "nothing", how)
    for right, readable, segments in results:
        assert right
        assert readable == world_size - 1
        assert 0 < segments <= MOST_SEGMENTS


READABLE = {  # what may be in the way, and of how many peers each rank then reads the memory
    "no memory on one rank": 0,
    "one rank's memory is used up": 2,
    "one rank cannot read": 0,
    "hosts that look alike": 0,
    "turned off": 0,
    "turned off on one rank": 0,
}


@pytest.mark.parametrize("how", ["copied", "from its room"])
@pytest.mark.parametrize("hindrance", READABLE)
def test_pieces_arrive_by_gloo_where_memory_cannot_be_shared(
    pool: RankPool, hindrance: str, how: str
) -> None:
    results = pool.run(memory_workers.exchange_all, 3, hindrance, how)
    assert all(right for right, *_ in results)
    assert [readable for _, readable, _ in results] == [READABLE[hindrance]] * 3


def test_reads_in_place_is_one_answer_on_all_ranks(pool: RankPool) -> None:
    assert pool.run(memory_workers.reads_in_place, 2, "nothing") == [[False, True]] * 2
    answers = pool.run(memory_workers.reads_in_place, 2, "one rank cannot read")
    assert answers == [[False] * 2] * 2


@pytest.mark.parametrize(
    ("batch_sizes", "collectives"),
    [
        ((3, 5), 5),
        pytest.param((3, 5, 2), 6, marks=pytest.mark.slow),
    ],  # a pair makes no sums of dense gradients
)
def test_training_by_memory_equals_unsharded(
    pool: RankPool, batch_sizes: tuple[int, ...], collectives: int
) -> None:
    tables = [tables_of(name, "fused_torch")[index % 3] for index, name in enumerate(TYPES)]
    case = Case(tables, batch_sizes, optimizer="row_wise_adagrad")
    results = pool.run(memory_workers.train_by_memory, len(batch_sizes), case)
    assert_equals_unsharded(case, results, collectives=[collectives] * NUM_STEPS)


@pytest.mark.parametrize(
    ("kernel", "pooling"),
    [
        ("fused_torch", "MEAN"),
        pytest.param("fused_numba", "NONE", marks=pytest.mark.slow),
        pytest.param("fused_torch", "NONE", marks=pytest.mark.slow),
        pytest.param("fused_numba", "MEAN", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_that_add_up_in_each_others_memory_equal_unsharded(
    pool: RankPool, kernel: str, pooling: str
) -> None:
    if kernel == "fused_numba":
        pytest.importorskip("numba")
    tables = [
        Table(rows, 4, features, pooling, "data_parallel", kernel)
        for rows, features in ((3, ("a", "b")), (3, ("c",)), (500, ("a",)))
    ]
    case = Case(tables, (9, 8), optimizer="row_wise_adagrad", max_length=9)
    results = pool.run(memory_workers.train_by_memory, 2, case)
    assert_equals_unsharded(case, results, collectives=[3] * NUM_STEPS)  # headers, rows or batch, dense


def test_rank_that_is_killed_before_memory_is_shared_is_named(pool: RankPool) -> None:
    with pytest.raises(RankError) as error:
        pool.run(memory_workers.leave_before_meeting, 2)
    assert error.value.results[0].startswith(
        "DistributedError: rank 0: the exchange of values failed: rank 1 has ended: "
    )


def test_what_was_sent_outlives_the_group_of_its_sender(pool: RankPool) -> None:
    assert pool.run(memory_workers.read_late, 2) == [True, True]


def test_ranks_without_memory_left_may_wait_for_two_exchanges_in_opposite_orders(pool: RankPool) -> None:
    assert pool.run(memory_workers.wait_in_opposite_orders, 2) == [[True, True]] * 2


def test_messages_of_exchanges_that_are_dropped_are_not_kept(pool: RankPool) -> None:
    assert pool.run(memory_workers.drop_exchanges, 3, 6) == [([0] * 6, True)] * 3


def test_messages_that_a_rank_does_not_wait_for_yet_hold_nobody_up(pool: RankPool) -> None:
    assert pool.run(memory_workers.send_more_than_there_is_room_for, 2) == [True] * 2


def test_rank_that_sends_something_else_is_named(pool: RankPool) -> None:
    texts = pool.run(memory_workers.exchange_other_sizes, 2)
    assert texts[0].startswith("DistributedError: rank 0: the exchange of values failed: ")
    assert texts[0].endswith("rank 1 sent 12 bytes where 8 were expected: it makes another call")


def test_memory_that_was_first_needed_in_inference_mode_serves_training(pool: RankPool) -> None:
    for right in pool.run(memory_workers.exchange_in_inference_mode_first, 2):
        assert all(right)


def test_group_that_is_connected_to_again_shares_memory_again(pool: RankPool) -> None:
    assert pool.run(memory_workers.connect_again, 2) == [[True] * 3] * 2


def test_process_that_was_forked_waits_until_what_it_sent_is_read() -> None:
    assert printed_by("-W", "ignore", "-m", forked_sender.__name__) == "[7, 7, 7, 7, 7]\n0\n"
