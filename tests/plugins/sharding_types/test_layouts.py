"""What every built-in sharding type offers, what each is about, and where it is planned."""

from __future__ import annotations

import json
from itertools import groupby

import pytest

from shardwright import (
    EmbeddingShardingPlanner,
    Exchange,
    NoPlanError,
    ParameterConstraints,
    PlanError,
    ShardingPlan,
    TableSpec,
    Topology,
)
from shardwright.host import host
from shardwright_plugins.dataflows import Hierarchical, Replicate
from shardwright_plugins.sharding_types.column_wise import ColumnWise
from shardwright_plugins.sharding_types.data_parallel import DataParallel
from shardwright_plugins.sharding_types.grid_shard import GridShard
from shardwright_plugins.sharding_types.row_wise import RowWise
from shardwright_plugins.sharding_types.table_column_wise import TableColumnWise
from shardwright_plugins.sharding_types.table_row_wise import TableRowWise
from shardwright_plugins.sharding_types.table_wise import TableWise

ABBREVIATIONS = {
    "column_wise": "CW",
    "data_parallel": "DP",
    "grid_shard": "GS",
    "row_wise": "RW",
    "table_column_wise": "TWCW",
    "table_row_wise": "TWRW",
    "table_wise": "TW",
}
BUILT_IN = tuple(ABBREVIATIONS)


def layouts_of(kind, rows=10, dim=64, ranks=2, local=None, **rule):
    table = TableSpec("t", rows, dim, ["f"])
    topology = Topology(ranks, "cpu", local_world_size=local)
    return list(kind.layouts(table, topology, ParameterConstraints(**rule)))


def blocks_of(layout):
    return [
        (block.rank, block.rows.bounds, (block.columns.start, block.columns.stop)) for block in layout.blocks
    ]


@pytest.mark.parametrize("name", BUILT_IN)
def test_types_have_the_abbreviations_of_torchrecs_report(name):
    assert host().sharding_types.create(name).abbreviation == ABBREVIATIONS[name]


def test_table_wise_is_one_block_on_any_rank():
    assert [blocks_of(layout) for layout in layouts_of(TableWise())] == [[(None, (0, 10), (0, 64))]]


def test_row_wise_block_of_each_rank_has_the_rows_of_torchrec():
    (layout,) = layouts_of(RowWise(), rows=10, ranks=4)
    assert blocks_of(layout) == [
        (0, (0, 3), (0, 64)),
        (1, (3, 6), (0, 64)),
        (2, (6, 9), (0, 64)),
        (3, (9, 10), (0, 64)),
    ]


def places_of(layout):
    return [
        (
            block.rank,
            block.host_group,
            block.local_rank,
            block.rows.bounds,
            (block.columns.start, block.columns.stop),
        )
        for block in layout.blocks
    ]


def test_table_row_wise_part_i_is_on_rank_i_of_some_host():
    (layout,) = layouts_of(TableRowWise(), rows=10, ranks=8, local=4)
    bounds = [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert places_of(layout) == [(None, 0, rank, pair, (0, 64)) for rank, pair in enumerate(bounds)]
    assert layout.dataflow == Hierarchical()


def test_grid_shard_column_blocks_are_cut_by_rows_on_hosts_of_their_own_choice():
    (layout,) = layouts_of(GridShard(), rows=5, ranks=4, local=2)
    assert places_of(layout) == [
        (None, 0, 0, (0, 3), (0, 32)),
        (None, 0, 1, (3, 5), (0, 32)),
        (None, 1, 0, (0, 3), (32, 64)),
        (None, 1, 1, (3, 5), (32, 64)),
    ]
    assert layout.dataflow == Hierarchical()


def test_table_column_wise_blocks_are_column_wises_on_any_ranks_of_one_host():
    together, apart = (
        layouts_of(kind(), dim=128, ranks=4, local=2) for kind in (TableColumnWise, ColumnWise)
    )
    assert [blocks_of(layout) for layout in together] == [blocks_of(layout) for layout in apart]
    for layout in together:
        assert {(block.host_group, block.local_rank) for block in layout.blocks} == {(0, None)}
        assert layout.dataflow == Exchange()


def test_data_parallel_is_the_whole_table_on_each_rank():
    (layout,) = layouts_of(DataParallel(), ranks=4, local=2)
    assert places_of(layout) == [(rank, None, None, (0, 10), (0, 64)) for rank in range(4)]
    assert layout.dataflow == Replicate()


@pytest.mark.parametrize("kind", [ColumnWise, GridShard, TableColumnWise])
@pytest.mark.parametrize(
    ("dim", "min_partition", "widths"),
    [
        (64, None, [[32, 32]]),
        (128, None, [[64, 64], [32] * 4]),
        (128, 64, [[64, 64]]),
        (96, None, [[48, 48], [32] * 3]),
        (100, None, [[32, 32, 36]]),
        (70, None, [[32, 38]]),
        (64, 4, [[32] * 2, [16] * 4, [8] * 8, [4] * 16]),
        (16, None, []),
        (63, None, []),
    ],
)
def test_widths_of_every_variant_of_the_types_that_cut_columns(kind, dim, min_partition, widths):
    layouts = layouts_of(kind(), dim=dim, ranks=1, min_partition=min_partition)
    assert [[block.num_columns for block in layout.blocks] for layout in layouts] == widths
    word = "column blocks" if kind is GridShard else "blocks"
    assert [layout.variant for layout in layouts] == [f"{len(blocks)} {word}" for blocks in widths]


@pytest.mark.parametrize("kind", [ColumnWise, GridShard, TableColumnWise])
def test_table_too_narrow_to_be_cut_stays_whole_when_asked_by_name(kind):
    (layout,) = layouts_of(kind(), dim=16, ranks=1, sharding_types=[kind.name])
    assert blocks_of(layout) == [(None, (0, 10), (0, 16))]
    assert not layouts_of(kind(), dim=16, ranks=1)


TYPES = (
    "column_wise",
    "data_parallel",
    "grid_shard",
    "row_wise",
    "table_column_wise",
    "table_row_wise",
    "table_wise",
)


HOSTS = [(1, 1), (1, 4), (2, 2), (4, 2)]


TABLES = [
    TableSpec("a", 1000, 64, ["f"]),
    TableSpec("b", 3, 128, ["g"], module="tower"),
    TableSpec("c", 70, 70, ["h"]),
]


def planned(tables, num_hosts, local, kinds, kernels=None, **arguments):
    """The plan and the planner's report, each table with one of ``kinds`` in turn."""
    rules = {
        table.path: ParameterConstraints(sharding_types=[kinds[index % len(kinds)]], compute_kernels=kernels)
        for index, table in enumerate(tables)
        if kinds
    }
    topology = Topology(num_hosts * local, "cpu", local_world_size=local, **arguments)
    planner = EmbeddingShardingPlanner(topology, constraints=rules)
    return planner.plan_tables(tables), planner.report


def shardings(plan):
    return [sharding for module in plan.plan.values() for sharding in module.values()]


@pytest.mark.parametrize(("num_hosts", "local"), HOSTS)
@pytest.mark.parametrize("kind", TYPES)
def test_type_is_planned_where_its_blocks_may_go_and_survives_json(kind, num_hosts, local):
    plan, report = planned(TABLES, num_hosts, local, [kind])
    for sharding in shardings(plan):
        assert sharding.sharding_type == kind
        blocks = sharding.layout.blocks
        hosts = [rank // local for rank in sharding.ranks]
        if kind in ("table_row_wise", "table_column_wise"):
            assert len(set(hosts)) == 1
        if kind in ("table_row_wise", "grid_shard"):
            assert [rank % local for rank in sharding.ranks] == [block.rows.index for block in blocks]
            for _, group in groupby(zip(blocks, hosts, strict=True), key=lambda pair: pair[0].columns):
                assert len({host for _, host in group}) == 1
        if kind in ("data_parallel", "row_wise"):
            assert sharding.ranks == list(range(num_hosts * local))
        assert (sharding.sharding_spec is None) == (kind == "data_parallel")
    again = ShardingPlan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert str(again) == str(plan)
    assert f"({kind}" in str(report)


def test_data_parallel_that_fits_on_one_rank_but_not_on_each_has_no_plan():
    with pytest.raises(NoPlanError):
        planned(TABLES[:1], 1, 2, ["data_parallel"], ddr_cap=[10_000_000, 1000])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda shards: shards.pop(), "rank 1 has 0 copies"),
        (lambda shards: shards.append(dict(shards[0])), "rank 0 has 2 copies"),
        (lambda shards: shards[0].update(rows=[0, 500]), r"has no part \(0, 500\)"),
        (
            lambda shards: shards[1].update(columns=[0, 32]),
            "the copy on rank 1 has 32 columns; .* needs all 64",
        ),
    ],
)
def test_data_parallel_document_edited_wrongly_raises(change, text):
    plan, _ = planned(TABLES[:1], 1, 2, ["data_parallel"])
    document = json.loads(plan.to_json())
    change(document["modules"][""]["a"]["shards"])
    with pytest.raises(PlanError, match=text):
        ShardingPlan.from_json(json.dumps(document))


def test_gang_that_fits_on_no_host_has_no_plan_and_the_numbers_are_given():
    # Each half of 'a' fits on the large ranks, one of each host: never both halves on one host.
    caps = [4_000_000, 100_000, 4_000_000, 100_000]
    with pytest.raises(
        NoPlanError,
        match=r"it is proven that .* table 'a' .* needs 2\.0 MiB of ddr; .* most room \([13]\) has 8",
    ):
        planned([TableSpec("a", 10_000, 64, ["f"])], 2, 2, ["table_row_wise"], ddr_cap=caps)
