"""Plans for serving: the latency of a batch, without gradients and optimizer state; copies where memory permits."""

from __future__ import annotations

import attrs
import pytest
from tests.own_rows import SCALE, Bringing, OwnRows, kernel_of

from shardwright.errors import InvalidInputError, PlanningError
from shardwright.host import PluginHost, use_host
from shardwright.planning.machines.topology import GIB, Topology
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.planner import TablePlanner
from shardwright.planning.tables.constraints import ParameterConstraints
from shardwright.planning.tables.optimizers import OptimizerSpec
from shardwright.planning.tables.spec import TableSpec
from shardwright_plugins.plan_differences.check import check_plan

MIB = 1 << 20
ESTIMATORS = ["torchrec", "roofline"]
BIG = [TableSpec(f"big_{i}", 1_000_000, 64, ("f",), optimizer=OptimizerSpec("adam")) for i in range(3)]
HOT = [TableSpec(f"hot_{i}", 1000, 64, ("f",), optimizer=OptimizerSpec("adam")) for i in range(3)]
TWO = {"*": ParameterConstraints(pooling_factors=[2.0])}
IDS = {"hot_*": ParameterConstraints(pooling_factors=[50.0]), **TWO}


def planner(topology=None, *, objective="serving", **arguments):
    topology = topology or Topology(4, "cpu", ddr_cap=2 * GIB)
    return TablePlanner(topology, 64, objective=objective, **{"constraints": IDS, **arguments})


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_serving_costs_are_those_of_lookups_alone(estimator):
    made = planner(estimator=estimator)
    made.plan_tables([*BIG, *HOT])
    phases = made.report.to_data()["ranks"][0]["phases_ms"]
    backward = [ms for phase, ms in phases.items() if phase.startswith("backward")]
    assert len(backward) == 2
    assert not any(backward)
    value = max(sum(rank["phases_ms"].values()) for rank in made.report.to_data()["ranks"])
    assert made.report.plan.value_ms == pytest.approx(value)
    assert "serving" in made.report.summary[2]
    assert "latency of a batch" in made.report.summary[2]


def test_serving_holds_no_optimizer_state():
    alone = Topology(1, "cpu", ddr_cap=4 * GIB)
    used = {}
    for objective in ("largest_rank_time", "serving"):
        made = planner(alone, objective=objective, constraints=TWO)
        made.plan_tables(BIG)
        used[objective] = int(made.report.plan.used_bytes.sum())
    weights = sum(4 * table.num_embeddings * table.embedding_dim for table in BIG)
    assert weights <= used["serving"] < weights + MIB
    assert used["largest_rank_time"] > 3 * weights  # adam has two values an element


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_small_hot_tables_are_copied_to_every_rank_where_memory_permits(estimator):
    plan = planner(estimator=estimator).plan_tables([*BIG, *HOT])
    for name in ("hot_0", "hot_1", "hot_2"):
        assert plan.plan[""][name].sharding_type == "data_parallel"
        assert plan.plan[""][name].ranks == [0, 1, 2, 3]


def test_serving_refuses_replicas_that_are_averaged():
    group = Topology(8, "cpu", local_world_size=4).sharding_group(4)
    with pytest.raises(InvalidInputError):
        planner(group)


@pytest.fixture
def own_rows():
    kernels = [kernel_of(OwnRows(f"OWN{bits}", bits), f"own_{bits}") for bits in (8, 4, 2)]
    with use_host(PluginHost(plugins={"own": Bringing(*kernels)})):
        yield


@pytest.mark.parametrize(("data_type", "row_bytes"), [("OWN8", 64), ("OWN4", 32), ("OWN2", 16)])
@pytest.mark.usefixtures("own_rows")
@pytest.mark.parametrize("storage", ["weights_and_buffers", "torchrec_storage"])
def test_tables_of_a_row_format_take_the_bytes_of_its_rows(data_type, row_bytes, storage):
    tables = [attrs.evolve(table, data_type=data_type) for table in BIG]
    made = planner(Topology(1, "cpu"), constraints=TWO, storage_estimator=storage)
    plan = made.plan_tables(tables)
    stored = sum(table.num_embeddings for table in tables) * (SCALE + row_bytes)
    assert stored <= made.report.plan.used_bytes.sum() < stored + MIB
    assert {one.compute_kernel for one in plan.plan[""].values()} == {f"own_{data_type[3:]}"}
    assert not check_plan(ShardingPlan.from_json(plan.to_json())).problems


@pytest.mark.usefixtures("own_rows")
def test_tables_of_a_row_format_cannot_be_planned_for_training():
    tables = [attrs.evolve(table, data_type="OWN8") for table in BIG]
    with pytest.raises(PlanningError, match=r"no option is left.* plan with objective='serving'"):
        planner(objective="largest_rank_time").plan_tables([*tables, *HOT])
    assert planner(constraints=TWO).plan_tables(tables).plan[""]["big_0"].compute_kernel == "own_8"


@pytest.mark.usefixtures("own_rows")
def test_data_type_that_no_kernel_brings_is_refused_with_those_that_are_read():
    with pytest.raises(PlanningError, match=r"'own_8': it reads no rows of OWN3, but of OWN8"):
        planner().plan_tables([attrs.evolve(HOT[0], data_type="OWN3")])
