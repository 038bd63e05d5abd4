"""Sums inside the host: the same numbers as straight home, and fewer bytes between hosts."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from attrs import evolve
from tests.core.runtime.plans import Cut, Cuts, train_step, train_unsharded

from shardwright import Exchange, KeyedJaggedTensor, RowsModulo, RowsRange, UnsupportedError
from shardwright_plugins.dataflows import Hierarchical
from shardwright_testing.simulated import run_simulated

HOST_SIZE, WORLD_SIZE = 2, 4
BATCH_SIZES = (3, 1, 0, 4)
BY_ROWS_INSIDE_HOSTS = (
    Cut(11, 4, ("a",), "SUM", RowsRange(11, parts=2), (), (0, 1)),
    Cut(9, 6, ("b", "a"), "MEAN", RowsModulo(9, parts=2), (), (2, 3), "loop_by_sample"),
    Cut(7, 3, ("b",), "SUM", RowsRange(7, parts=2), (), (3, 2)),
)
BY_ROWS_AND_COLUMNS = (  # each column block on a host of its own
    Cut(8, 6, ("a", "b"), "SUM", RowsRange(8, parts=2), (4,), (0, 2, 1, 3), "loop_by_sample"),
    Cut(5, 2, ("b",), "MEAN", RowsRange(5, parts=2), (), (1, 0)),
)


def with_flow(tables, *flows):
    """The tables, the dataflows in turn."""
    return Cuts([evolve(table, dataflow=flows[i % len(flows)]) for i, table in enumerate(tables)], WORLD_SIZE)


def every_row(case, batch_size):
    """A batch of which every bag has each row of the smallest table of its feature: no partial sum is empty."""
    rows = {
        feature: min(table.rows for table in case.tables if feature in table.features)
        for feature in case.features
    }
    return KeyedJaggedTensor(
        keys=case.features,
        values=torch.cat([torch.arange(rows[feature]).repeat(batch_size) for feature in case.features]),
        lengths=torch.cat([torch.full((batch_size,), rows[feature]) for feature in case.features]).int(),
    )


def train(case, *, host_size=HOST_SIZE, full=False):
    """Three steps; for each rank its outputs, weights, and the bytes it sent to each rank by label."""
    module = case.module()

    def batch(step, rank):
        size = BATCH_SIZES[rank]
        return every_row(case, size) if full else case.batch(size, seed=10 * step + rank)

    def work(env):
        sharded = case.shard(env, module)
        first = len(env.communicator.sent_bytes)
        outputs = [train_step(case, sharded, batch(step, env.rank), step, env.rank) for step in range(3)]
        return outputs, env.communicator.sent_bytes[first:], sharded.full_state_dict()

    return run_simulated(work, case.world_size, local_world_size=host_size)


def between_hosts(results):
    """Bytes of `results` and of `gradients` that ranks sent to ranks of other hosts."""
    total = Counter()
    for rank, (_, sent_bytes, _) in enumerate(results):
        for label, by_rank in sent_bytes:
            other_hosts = [size for to, size in enumerate(by_rank) if to // HOST_SIZE != rank // HOST_SIZE]
            total[label.split()[0]] += sum(other_hosts)
            if label.endswith("inside the host"):
                assert sum(other_hosts) == 0
    return total


@pytest.mark.parametrize(
    "tables", [BY_ROWS_INSIDE_HOSTS, BY_ROWS_AND_COLUMNS], ids=["rows", "rows and columns"]
)
def test_host_sums_send_one_rank_of_a_hosts_share_of_bytes_to_other_hosts(tables):
    straight = between_hosts(train(with_flow(tables, Exchange()), full=True))
    summed = between_hosts(train(with_flow(tables, Hierarchical()), full=True))
    for label in ("results", "gradients"):
        assert straight[label] == HOST_SIZE * summed[label] > 0
    assert summed["ids"] == straight["ids"]


def test_host_sums_bytes_to_other_hosts_are_those_of_one_sum_a_bag():
    summed = between_hosts(train(with_flow(BY_ROWS_INSIDE_HOSTS[:1], Hierarchical())))
    samples_of_the_other_host = sum(BATCH_SIZES[2:])
    assert (
        summed["results"] == summed["gradients"] == 3 * samples_of_the_other_host * 4 * 4
    )  # steps, columns, bytes


def test_gradients_reach_their_groups_where_the_first_rank_lacks_the_first_way_home():
    rows = RowsRange(2, parts=2)
    tables = [
        Cut(3, 8, ("a",), edges=(4,), ranks=(1, 2)),
        Cut(2, 8, ("a",), "SUM", rows, (4,), (0, 0, 1, 1), dataflow=Hierarchical()),
    ]
    case = Cuts(tables, 4)
    batches = [
        [case.batch(size, seed=10 * step + rank) for rank, size in enumerate(BATCH_SIZES)]
        for step in range(3)
    ]
    expected = train_unsharded(case, batches)
    for *_, state in train(case):
        torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-5)


def test_host_sums_without_equal_hosts_raise_with_the_numbers():
    case = Cuts([Cut(4, 2, ("a",), dataflow=Hierarchical())], 3)
    module = case.module()
    with pytest.raises(UnsupportedError, match=r"3 ranks do not divide into hosts of 2 \(LOCAL_WORLD_SIZE\)"):
        run_simulated(lambda env: case.shard(env, module), 3, local_world_size=2)
