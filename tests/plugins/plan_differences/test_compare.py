from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from shardwright import (
    Block,
    ComputeKernel,
    EmbeddingModuleShardingPlan,
    Layout,
    ParameterSharding,
    PlanError,
    RowMap,
    RowsModulo,
    RowsRange,
    RowsSplit,
    ShardingPlan,
    TableSpec,
    Topology,
)
from shardwright_plugins.dataflows import Replicate
from shardwright_plugins.plan_differences import compare
from shardwright_plugins.plan_differences.compare import compare_plans

RANKS = 3


def plan_of(layout, kind="any", **document):
    return ShardingPlan(
        {"": EmbeddingModuleShardingPlan(t=ParameterSharding(kind, "plain", layout))}, document
    )


@frozen
class Backwards(RowMap):
    """The last rows first, in two parts: rows that are listed, and no slice."""

    name = "backwards"
    num_rows: int

    @property
    def num_parts(self):
        return 2

    def part_of(self, ids):
        return (self.num_rows - 1 - ids) % 2

    def local_row_of(self, ids):
        return (self.num_rows - 1 - ids) // 2

    def rows_of(self, part):
        return np.arange(self.num_rows - 1 - part, -1, -2)


def held(layout, rows, dim):
    """Which elements each rank has: [W, rows, dim]."""
    mask = np.zeros((RANKS, rows, dim), dtype=bool)
    for block in layout.blocks:
        here = np.zeros((rows, dim), dtype=bool)
        here[block.rows.rows, block.columns.start : block.columns.stop] = True
        mask[block.rank] |= here
    return mask


@st.composite
def layouts(draw, rows, dim):
    if draw(st.integers(0, 4)) == 0:
        table = TableSpec("t", rows, dim)
        return Layout(
            [Block(table.all_rows, table.all_columns, rank) for rank in range(RANKS)], dataflow=Replicate()
        )
    cuts = sorted(draw(st.lists(st.integers(0, rows), max_size=3)))
    maps = [RowsSplit((0, *cuts, rows)), RowsRange(rows, parts=3), Backwards(rows)]
    maps += [RowsModulo(rows, parts=parts) for parts in (2, 3, 4, 6)]
    row_map = draw(st.sampled_from(maps))
    columns = sorted(draw(st.sets(st.integers(1, dim - 1), max_size=2)))
    table = TableSpec("t", rows, dim)
    spans = [table.columns(a, b) for a, b in zip([0, *columns], [*columns, dim], strict=True)]
    rank = st.integers(0, RANKS - 1)
    return Layout([Block(part, span, draw(rank)) for part in row_map for span in spans])


@given(st.data(), st.integers(1, 12), st.integers(2, 6))
def test_compare_counts_what_ranks_do_not_hold_yet(data, rows, dim):
    first, second = data.draw(layouts(rows, dim)), data.draw(layouts(rows, dim))
    found = compare_plans(plan_of(first, "a"), plan_of(second, "b"))
    missing = held(second, rows, dim) & ~held(first, rows, dim)
    assert found.moved_bytes == 4 * missing.sum()
    assert {rank: got for rank, (_, got) in found.moves.by_rank.items() if got} == {
        rank: 4 * count for rank, count in enumerate(missing.sum(axis=(1, 2)).tolist()) if count
    }
    assert found.changes[0].total_bytes == 4 * held(second, rows, dim).sum()


def whole(rank, rows=10, dim=8):
    table = TableSpec("t", rows, dim)
    return Layout([Block(table.all_rows, table.all_columns, rank)])


def test_compare_another_kernel_moves_nothing_and_is_a_change():
    other = ShardingPlan({"": EmbeddingModuleShardingPlan(t=ParameterSharding("any", "thorough", whole(1)))})
    (change,) = compare_plans(plan_of(whole(1)), other).changes
    assert (change.before, change.after, change.moved_bytes) == (("any", "plain"), ("any", "thorough"), 0)


def test_compare_counts_bytes_of_the_tables_data_type():
    sizes = {"num_embeddings": 10, "embedding_dim": 8}
    inputs = {"tables": {"value": [{"name": "t", "data_type": "FP16", **sizes}]}}
    found = compare_plans(plan_of(whole(0)), plan_of(whole(1), inputs=inputs))
    assert found.moved_bytes == 10 * 8 * 2


def test_compare_new_and_dropped_tables_are_changes():
    empty = ShardingPlan({"": EmbeddingModuleShardingPlan()})
    (new,) = compare_plans(empty, plan_of(whole(1))).changes
    (gone,) = compare_plans(plan_of(whole(1)), empty).changes
    assert (new.before, new.moved_bytes) == (None, 320)
    assert (gone.after, gone.moved_bytes) == (None, 0)


def test_compare_tables_of_another_size_raises():
    with pytest.raises(PlanError, match=r"table 't' has 10 x 8 elements in the first plan and 9 x 8"):
        compare_plans(plan_of(whole(0)), plan_of(whole(0, rows=9)))


def moved_between_hosts(**document):
    """A table of 10 x 8 elements on ranks 0 and 1, that goes to ranks 1 and 2, of two on a host."""
    table = TableSpec("t", 10, 8)

    def on(first):
        parts = RowsRange(10, parts=2)
        return Layout([Block(part, table.all_columns, first + n) for n, part in enumerate(parts)])

    topology = Topology(4, "cpu", local_world_size=2, ddr_mem_bw=1000, intra_host_bw=100, inter_host_bw=10)
    return compare_plans(plan_of(on(0), **document), plan_of(on(1), topology=topology.to_data())).moves


def test_moves_are_told_by_link_and_rank():
    moves = moved_between_hosts()
    assert moves.by_link == {"same_rank": 0, "intra_host": 160, "inter_host": 160}
    assert moves.by_rank == {0: (160, 0), 1: (160, 160), 2: (0, 160)}
    assert not moves.counts_states  # the document does not say what the table's optimizer is


def test_moves_take_the_time_of_the_slowest_rank():
    # Rank 1 gets 160 B inside the host and sends 160 B to the other; all of it goes through its memory twice.
    assert moved_between_hosts().ms == pytest.approx(160 / 10 + 2 * 320 / 1000)


@pytest.mark.parametrize(
    ("optimizer", "state_bytes"), [("sgd", 0), ("adam", 2 * 320), ("row_wise_adagrad", 4 * 10)]
)
def test_moves_count_the_optimizer_states_that_a_kernel_declares(optimizer, state_bytes, monkeypatch):
    class Plain(ComputeKernel):
        name = "plain"
        supports = build = None

        def memory_bytes(self, request, num_rows):
            values = {"sgd": 0, "adam": 2 * request.num_columns, "row_wise_adagrad": 1}[
                request.optimizer.name
            ]
            return {"device": 4 * num_rows * (request.num_columns + values)}

    kernels = SimpleNamespace(create={"plain": Plain()}.get)
    monkeypatch.setattr(compare, "host", lambda: SimpleNamespace(compute_kernels=kernels))
    sizes = {"num_embeddings": 10, "embedding_dim": 8, "optimizer": {"name": optimizer}}
    inputs = {"tables": {"value": [{"name": "t", **sizes}]}}
    moves = compare_plans(plan_of(whole(0), inputs=inputs), plan_of(whole(1), "b")).moves
    assert moves.by_rank == {0: (320 + state_bytes, 0), 1: (0, 320 + state_bytes)}
    assert moves.counts_states


def test_difference_is_json_data():
    moves = moved_between_hosts().to_data()
    assert moves["bytes"]["inter_host"] == 160
    data = compare_plans(plan_of(whole(0)), plan_of(whole(1))).to_data()
    assert json.loads(json.dumps(data))["reshard"]["ranks"]["1"] == {"sent_bytes": 0, "received_bytes": 320}
