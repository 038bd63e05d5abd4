"""Each built-in type through planner, document and report, on hosts of several sizes."""

from __future__ import annotations

import json
from itertools import groupby

import pytest

from shardwright import (
    EmbeddingShardingPlanner,
    NoPlanError,
    ParameterConstraints,
    PlanError,
    ShardingPlan,
    TableSpec,
    Topology,
)

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
