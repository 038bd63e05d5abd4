"""hot_rows keeps what every sharding type must, trains as the unsharded module, and parts a table by counts of ids."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shardwright_hot_rows import AccessCounts, HotAndCold, HotRows
from tests.contrib.hot_rows import zipf
from tests.equality import BATCHES, Case, Table, assert_equals_unsharded, train_simulated
from tests.pairs import pairwise

import shardwright as sw
from shardwright.planning.options.search_space import traffic_bytes
from shardwright_testing import ShardingTypeTests, installed
from shardwright_testing.equality import traffic
from shardwright_testing.equality.random_cases import Cluster
from shardwright_testing.equality.type_under_test import TypeUnderTest


def falling(table: sw.TableSpec, constraints: sw.ParameterConstraints) -> AccessCounts:
    """Counts that fall by Zipf's law from the last row to the first, whatever the table."""
    return AccessCounts.of(1000 // np.arange(table.num_embeddings, 0, -1))


@pytest.mark.slow
class TestHotRows(ShardingTypeTests):
    @pytest.fixture
    def sharding_type(self) -> sw.ShardingType:
        return HotRows(falling)


@pytest.mark.parametrize(("ids", "results"), [(2.0, 1.0), (1.0, 2.0)], ids=["ids", "results"])
def test_kit_compares_the_traffic_of_cold_rows_beside_copies(
    monkeypatch: pytest.MonkeyPatch, ids: float, results: float
) -> None:
    """Reckoned with bytes that are not sent, the type fails: layouts with copies are not passed over."""

    def wrong(options: sw.Options, topology: sw.Topology) -> tuple[Any, Any]:
        received, sent = traffic_bytes(options, topology)
        return received * ids, sent * results

    table, cluster = sw.TableSpec("t", 12, 8, ["f"]), Cluster(1, 2)
    with installed(HotRows(falling)):
        asked = TypeUnderTest(HotRows(falling), sw.ParameterConstraints())
        traffic.check_traffic(asked, table, cluster, is_weighted=True)
        monkeypatch.setattr(traffic, "traffic_bytes", wrong)
        with pytest.raises(AssertionError, match=r"layout '\d+ hot rows.*the planner reckons with"):
            traffic.check_traffic(asked, table, cluster, is_weighted=True)


def tables(pooling: tuple[str, str], kernel: str) -> list[Table]:
    """Several features, a feature in two tables, tables beside that are cut otherwise or copied as a whole."""
    return [
        Table(40, 8, ("a", "b"), pooling[0], "hot_rows", kernel, variant=2),
        Table(17, 8, ("a",), pooling[1], "hot_rows", kernel, variant=1),
        Table(9, 4, ("c",), pooling[0], "row_wise", kernel),
        Table(40, 8, ("c", "b"), pooling[1], "data_parallel", kernel),
        Table(3, 8, ("d",), pooling[0], "hot_rows", kernel),
    ]


TRAINED = [
    ("fused_torch", "sgd"),
    ("fused_torch", "adam"),
    ("fused_numba", "row_wise_adagrad"),
    ("dense", "adagrad"),
]


@pytest.mark.parametrize(
    ("pooling", "world_size", "trained"),
    pairwise(itertools.product([("SUM", "MEAN"), ("NONE", "NONE")], [1, 2, 3], TRAINED)),
)
def test_hot_rows_beside_other_types_equal_unsharded(
    pooling: tuple[str, str], world_size: int, trained: tuple[str, str]
) -> None:
    kernel, optimizer = trained
    case = Case(
        tables(pooling, kernel), (5, 2, 4)[:world_size], optimizer, pooling[0] == "SUM", batches=BATCHES
    )
    with installed(HotRows(falling)):
        assert_equals_unsharded(case, train_simulated(case))


def plan_of(pooling: str, **extras: Any) -> tuple[sw.EmbeddingShardingPlanner, sw.ShardingPlan]:
    rule = sw.ParameterConstraints(
        sharding_types=["hot_rows", "row_wise", "table_wise"], pooling_factors=[20], extras=extras
    )
    topology = sw.Topology(world_size=4, compute_device="cpu")
    planner = (
        sw.EmbeddingShardingPlanner(  # on one host `engine` takes whole tables, which the clock confirms
            topology=topology, constraints={"*": rule}, batch_size=512, estimator="roofline"
        )
    )
    return planner, planner.plan_tables([sw.TableSpec("item", zipf.ROWS, 64, ["item"], pooling=pooling)])


@pytest.mark.usefixtures("plugins")
def test_hot_rows_are_planned_where_counts_say_that_few_rows_carry_most_lookups() -> None:
    planner, plan = plan_of("NONE", **zipf.measured_counts().to_extras())
    sharding = plan.plan[""]["item"]
    assert sharding.sharding_type == "hot_rows"
    assert "HR (hot_rows" in str(planner.report)
    assert sw.ShardingPlan.from_json(plan.to_json()) == plan
    checked = sw.check_plan(plan)
    assert checked.value_ms == pytest.approx(plan.document["objective"]["value_ms"])


@pytest.mark.usefixtures("plugins")
def test_hot_rows_are_not_planned_where_all_rows_are_asked_for_alike_or_nothing_is_known() -> None:
    flat = AccessCounts.of(np.full(zipf.ROWS, 10))
    for extras in (flat.to_extras(), {}):
        assert plan_of("NONE", **extras)[1].plan[""]["item"].sharding_type != "hot_rows"


@pytest.mark.usefixtures("plugins")
def test_hot_rows_save_most_of_what_row_wise_exchanges_for_sequences() -> None:
    layouts = zipf.layouts("NONE", zipf.measured_counts())
    traffic = {
        name: zipf.step_traffic("NONE", own, batch_size=512, ids_per_bag=20) for name, own in layouts.items()
    }
    for name, own in traffic.items():
        vectors = foreign_ids(layouts[name].layout, 512 * 20)
        assert own.bytes_of["ids"] == vectors * 8
        assert own.bytes_of["results"] == own.bytes_of["gradients"] == vectors * zipf.DIM * 4
    base = traffic.pop("row_wise")
    assert min(own.total for own in traffic.values()) < 0.45 * base.total


def foreign_ids(layout: sw.Layout, num_ids: int) -> int:
    """The ids of all ranks' batches whose rows neither they nor everybody has."""
    owner = np.full(zipf.ROWS, -1)
    for block in layout.blocks:
        if not layout.dataflow_of(block).is_replicated:
            owner[block.rows.rows] = block.rank
    asked = [owner[zipf.zipf_ids(num_ids, rank).numpy()] for rank in range(zipf.WORLD_SIZE)]
    return sum(int(((own >= 0) & (own != rank)).sum()) for rank, own in enumerate(asked))


def test_counts_of_rows_fall_and_leave_out_what_nobody_asked_for() -> None:
    counts = AccessCounts.of([3, 0, 9, 3, 1])
    assert counts.rows.tolist() == [2, 0, 3, 4]
    assert counts.counts.tolist() == [9, 3, 3, 1]
    assert counts.total == 16
    assert AccessCounts.of([3, 0, 9, 3, 1], most_rows=2).rows.tolist() == [2, 0]


def test_counts_measured_on_batches_are_those_of_their_ids() -> None:
    counts = AccessCounts.measured([torch.tensor([1, 1, 3]), np.array([3, 3, 0])], 5)
    assert (counts.rows.tolist(), counts.counts.tolist(), counts.total) == ([3, 1, 0], [3, 2, 1], 6)


def test_counts_measured_on_one_array_are_those_of_its_ids_and_others_than_rows_are_refused() -> None:
    assert AccessCounts.measured(np.array([[1, 1], [3, 0]]), 5).counts.tolist() == [2, 1, 1]
    assert AccessCounts.measured(torch.tensor([]).long(), 5).total == 0
    for ids in ([np.array([1, 5])], torch.tensor([-1])):
        with pytest.raises(sw.InvalidInputError, match="ids must be 0 <= id < 5"):
            AccessCounts.measured(ids, 5)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.floats(0.01, 1.0))
def test_counts_rows_for_a_share_are_the_fewest_that_get_it(of_row: list[int], share: float) -> None:
    if not sum(of_row):
        return
    counts = AccessCounts.of(of_row)
    num_rows = counts.rows_for(share)
    assert counts.share_of(num_rows) >= share - 1e-9
    assert num_rows == 1 or counts.share_of(num_rows - 1) < share


def test_counts_in_extras_come_back_and_wrong_ones_say_what_is_wrong() -> None:
    counts = AccessCounts.of([3, 0, 9])
    again = AccessCounts.from_extras(counts.to_extras())
    assert again is not None
    assert (again.rows.tolist(), again.counts.tolist(), again.total) == ([2, 0], [9, 3], 12)
    assert AccessCounts.from_extras({"other": 1}) is None
    with pytest.raises(sw.InvalidInputError, match="an object of rows, counts and total: 'counts'"):
        AccessCounts.from_extras({"access_counts": {"rows": [1]}})


@pytest.mark.parametrize(
    ("rows", "counts", "total", "text"),
    [
        ([1, 1], [2, 1], 3, "2 counts for 1 different rows of 2"),
        ([1], [2, 1], 3, "2 counts for 1 different rows of 1"),
        ([1, 2], [1, 2], 3, "must fall from row to row"),
        ([1, 2], [2, 1], 2, "add up to 3"),
    ],
)
def test_counts_that_contradict_themselves_raise(rows: Any, counts: Any, total: int, text: str) -> None:
    with pytest.raises(sw.InvalidInputError, match=text):
        AccessCounts(rows, counts, total)


def test_hot_rows_asked_for_without_counts_say_what_to_give() -> None:
    constraints = {"user": sw.ParameterConstraints(sharding_types=["hot_rows"])}
    text = r"hot_rows.* has no access counts; give .* extras=AccessCounts"
    with installed(HotRows()):
        planner = sw.EmbeddingShardingPlanner(sw.Topology(2, "cpu"), 8, constraints=constraints)
        with pytest.raises(sw.PlanningError, match=text):
            planner.plan_tables([sw.TableSpec("user", 10, 8)])


def test_hot_rows_with_counts_of_another_table_raise_naming_both() -> None:
    rule = sw.ParameterConstraints(extras=AccessCounts.of([1, 2, 3, 4]).to_extras())
    table = sw.TableSpec("t", 3, 4, ["f"])
    with pytest.raises(sw.InvalidInputError, match=r"'t' \(3 x 4 FP32\) name row 3, which it does not have"):
        list(HotRows().layouts(table, sw.Topology(world_size=2, compute_device="cpu"), rule))


@given(st.integers(1, 40), st.data(), st.integers(1, 5))
def test_row_map_places_each_row_once_hot_ones_in_part_0(num_rows: int, data: Any, parts: int) -> None:
    hot = data.draw(st.sets(st.integers(0, num_rows - 1)))
    rows = HotAndCold(num_rows, hot=hot, cold_parts=parts, hot_share=0.5 if hot else 0.0)
    ids = np.arange(num_rows)
    part, local = rows.part_of(ids), rows.local_row_of(ids)
    assert set(ids[part == 0].tolist()) == hot
    for index in range(rows.num_parts):
        held = rows.rows_of(index)
        assert rows.num_rows_of(index) == len(held)
        assert part[held].tolist() == [index] * len(held)
        assert local[held].tolist() == list(range(len(held)))
    for array, tensor in (
        (part, rows.part_of(torch.from_numpy(ids))),
        (local, rows.local_row_of(torch.from_numpy(ids))),
    ):
        assert tensor.tolist() == array.tolist()
    beyond = num_rows + np.arange(20)
    told, limits = rows.part_of(beyond), [rows.num_rows_of(index) for index in range(rows.num_parts)]
    for index, row in zip(told.tolist(), rows.local_row_of(beyond).tolist(), strict=True):
        assert index > 0  # not hot
        assert index >= rows.num_parts or row >= limits[index]
    if len(hot) < num_rows:
        assert sum(rows.id_fraction_of(index) for index in range(rows.num_parts)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("hot", "share", "text"),
    [([4], 0.1, "row 4 is not in it"), ([1, 1], 0.1, "named twice"), ([1], 1.5, "between 0 and 1, got 1.5")],
)
def test_row_map_that_cannot_be_raises_with_the_numbers(hot: list[int], share: float, text: str) -> None:
    with pytest.raises(sw.InvalidInputError, match=text):
        HotAndCold(4, hot=hot, cold_parts=2, hot_share=share)
