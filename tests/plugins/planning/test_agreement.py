"""Whether shards agree with the sharding type that a plan names, for every built-in."""

from __future__ import annotations

import attrs
import pytest
from tests.plugins.built_in import built_in

from shardwright.contracts import ShardingType
from shardwright.host import host
from shardwright.planning.layouts.layout import Block, Exchange, Layout
from shardwright.planning.machines.topology import Topology
from shardwright.planning.plan.agreement import Agreement
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.tables.constraints import ParameterConstraints
from shardwright.planning.tables.spec import TableSpec
from shardwright.runtime.sharded.models.planner import EmbeddingShardingPlanner

TABLE = TableSpec("t", 1000, 256, ["f"])
TOPOLOGY = Topology(4, "cuda", local_world_size=2)
ASKED = ParameterConstraints()
TYPES = built_in("sharding_types")


def placed(name):
    """A layout of a sharding type with its free shards on ranks in turn, those of a gang on one host."""
    kind = host().sharding_types.create(name)
    layout = next(iter(kind.layouts(TABLE, TOPOLOGY, ParameterConstraints(min_partition=64))))
    ranks = [
        block.rank
        if block.rank is not None
        else 2 * ((block.host_group or 0) % 2)
        + (block.local_rank if block.local_rank is not None else index % 2)
        for index, block in enumerate(layout.blocks)
    ]
    return layout.placed(ranks)


def told(name, layout):
    return Agreement(TOPOLOGY).disagreement(host().sharding_types.create(name), TABLE, layout, ASKED)


@pytest.mark.parametrize("name", TYPES)
def test_disagreement_of_a_type_with_its_own_layout_is_none(name):
    assert told(name, placed(name)) == ""


@pytest.mark.parametrize("name", TYPES)
def test_disagreement_with_the_layouts_of_others_is_told_where_they_differ_in_kind(name):
    contradicted = {other for other in TYPES if told(name, placed(other))}
    # Columns cut over ranks of one host are columns cut over ranks; narrow tables are not cut, as in TorchRec.
    alike = {
        "column_wise": {"table_column_wise", "table_wise"},
        "table_column_wise": {"column_wise", "table_wise"},
        "grid_shard": {"table_row_wise"},
    }
    assert contradicted == set(TYPES) - {name} - alike.get(name, set())


def test_disagreement_of_a_gang_spread_over_hosts_names_the_hosts():
    layout = placed("table_row_wise")
    spread = layout.placed([1, 2])
    text = told("table_row_wise", spread)
    assert text.startswith("sharding type 'table_row_wise' cuts rows, ")
    assert text.endswith("stays on one host; the shards are on 2 hosts")


def test_disagreement_of_the_dataflow_alone_is_told():
    layout = placed("table_row_wise")
    direct = Layout([Block(b.rows, b.columns, b.rank) for b in layout.blocks], dataflow=Exchange())
    assert "dataflow 'exchange'" in told("table_row_wise", direct)


class Elsewhere(ShardingType):
    """Does not apply here; nor does what it would have said."""

    name, abbreviation = "elsewhere", "EW"

    def supports(self, table, topology):
        return "not here"

    def layouts(self, table, topology, constraints):
        yield from host().sharding_types.create("row_wise").layouts(table, topology, constraints)


def test_disagreement_where_the_type_makes_no_layout_is_none():
    assert Agreement(TOPOLOGY).disagreement(Elsewhere(), TABLE, placed("table_wise"), ASKED) == ""


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(("dim", "min_partition"), [(8, None), (256, None), (256, 200), (256, 16), (12, 4)])
def test_disagreement_of_what_a_planner_makes_is_none(name, dim, min_partition):
    rule = ParameterConstraints(sharding_types=[name], min_partition=min_partition)
    planner = EmbeddingShardingPlanner(TOPOLOGY, constraints={"t": rule})
    plan = planner.plan_tables([attrs.evolve(TABLE, embedding_dim=dim)])
    assert ShardingPlan.from_json(plan.to_json()) == plan
