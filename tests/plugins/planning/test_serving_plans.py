"""Plans for serving: the latency of a batch, without gradients and optimizer state; copies where memory permits."""

from __future__ import annotations

import json

import attrs
import numpy as np
import pytest
from tests.own_rows import SCALE, Bringing, OwnRows, kernel_of
from tests.plugins.planning.test_cli_plan import run

from shardwright.errors import InvalidInputError, NoPlanError, PlanningError
from shardwright.host import PluginHost, use_host
from shardwright.planning.machines.reservations import StorageReservation
from shardwright.planning.machines.topology import GIB, Topology
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.planner import TablePlanner
from shardwright.planning.tables.constraints import ParameterConstraints
from shardwright.planning.tables.optimizers import STILL, OptimizerSpec
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
def test_document_of_a_serving_plan_is_proven_again_and_says_when_it_is_edited(estimator):
    made = planner(estimator=estimator)
    plan = made.plan_tables([*BIG, *HOT])
    again = ShardingPlan.from_json(plan.to_json())
    found = check_plan(again)
    assert not found.problems
    assert found.lower_bound_ms > 0.98 * found.value_ms
    assert again.document["objective"]["name"] == "serving"
    assert all(table["is_frozen"] for table in again.document["inputs"]["tables"]["value"])
    # A bound that is not the certificate's, and an objective of training for such tables' value, are both seen.
    claims = {**again.document["objective"], "lower_bound_ms": 2 * found.lower_bound_ms}
    edited = attrs.evolve(again, document={**again.document, "objective": claims})
    assert any("not proven" in problem for problem in check_plan(edited).problems)
    inputs = json.loads(json.dumps(again.document["inputs"]))
    for table in inputs["tables"]["value"]:
        del table["is_frozen"]
    trained = attrs.evolve(again, document={**again.document, "inputs": inputs})
    assert any("value_ms" in problem for problem in check_plan(trained).problems)


def test_serving_keeps_free_what_inference_does():
    made = planner()
    made.plan_tables(HOT)
    inputs = made.report.inputs["storage_reservation"]
    assert inputs["provenance"] == "assumed"
    assert inputs["value"] == {"part": 0.15, "fixed_bytes": 0, "dense_multiplier": 0.0, "id_copies": 1}
    batch = 64 * (3 * 50) * 8  # ids of 8 bytes
    free = made.report.space.topology.capacity_bytes - made.report.space.capacity_bytes
    np.testing.assert_array_equal(free, np.full((4, 1), int(np.ceil(0.15 * 2 * GIB)) + batch))


def test_serving_with_a_reservation_of_ones_own_keeps_its_dense_tensors_free():
    weights = sum(4 * table.num_embeddings * table.embedding_dim for table in BIG)
    alone = Topology(1, "cpu", ddr_cap=weights + 64 * MIB)
    planner(alone, storage_reservation=StorageReservation(fixed_bytes=32 * MIB), constraints=TWO).plan_tables(
        BIG
    )
    with pytest.raises(NoPlanError):
        planner(
            alone, storage_reservation=StorageReservation(fixed_bytes=65 * MIB), constraints=TWO
        ).plan_tables(BIG)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_small_hot_tables_are_copied_to_every_rank_where_memory_permits(estimator):
    plan = planner(estimator=estimator).plan_tables([*BIG, *HOT])
    for name in ("hot_0", "hot_1", "hot_2"):
        assert plan.plan[""][name].sharding_type == "data_parallel"
        assert plan.plan[""][name].ranks == [0, 1, 2, 3]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_table_is_not_copied_where_memory_is_short(estimator):
    # 244 MiB each: all ranks together have room for each table once, none has it for all three.
    short = Topology(4, "cpu", ddr_cap=350 * MIB)
    roomy = Topology(4, "cpu", ddr_cap=2 * GIB)
    types = {
        topology.memory_bytes["ddr"][0]: planner(topology, estimator=estimator, constraints=TWO)
        .plan_tables(BIG)
        .plan[""]
        for topology in (short, roomy)
    }
    assert all(one.sharding_type != "data_parallel" for one in types[350 * MIB].values())
    assert all(one.sharding_type == "data_parallel" for one in types[2 * GIB].values())


def test_training_does_not_copy_what_serving_does():
    plan = planner(objective="largest_rank_time", estimator="roofline").plan_tables([*BIG, *HOT])
    assert any(one.sharding_type != "data_parallel" for one in plan.plan[""].values())


def test_serving_refuses_replicas_that_are_averaged():
    group = Topology(8, "cpu", local_world_size=4).sharding_group(4)
    with pytest.raises(InvalidInputError):
        planner(group)


def test_command_plans_for_serving_and_checks_it(tmp_path):
    workload, document = tmp_path / "tables.json", tmp_path / "plan.json"
    tables = [{"name": "user", "num_embeddings": 100_000, "embedding_dim": 64, "pooling_factor": 3.0}]
    workload.write_text(json.dumps({"tables": tables}))
    options = ("--ranks", "2", "--device", "cpu", "--objective", "serving", "--output", str(document))
    assert "serving:" in run("plan", workload, *options).stdout
    assert json.loads(document.read_text())["objective"]["name"] == "serving"
    assert "proven" in run("check", document).stdout


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
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_fewer_bits_are_looked_up_in_no_more_time_and_results_are_floats(estimator):
    alone = {"*": attrs.evolve(TWO["*"], sharding_types=["table_wise"])}
    forward, travelled = [], []
    for data_type in ("OWN8", "OWN4", "OWN2"):
        tables = [attrs.evolve(table, data_type=data_type, embedding_dim=256) for table in BIG]
        made = planner(Topology(3, "cpu"), constraints=alone, estimator=estimator)
        made.plan_tables(tables)
        phases = made.report.to_data()["ranks"][0]["phases_ms"]
        forward.append(phases["forward_compute"])
        travelled.append(phases["forward_communication"])
    assert forward == sorted(forward, reverse=True)
    assert forward[0] > forward[-1]
    assert travelled == [travelled[0]] * 3


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


def test_table_that_is_frozen_already_is_served_as_it_is():
    quantized = TableSpec("t", 10, 8, data_type="OWN8").served()
    assert (quantized.optimizer, quantized.is_frozen) == (None, True)
    halves = attrs.evolve(quantized, data_type="FP16")
    assert halves.served() == halves
    trained = TableSpec("t", 10, 8, optimizer=OptimizerSpec("adam"), update="in_step", max_gradient=1.0)
    assert trained.served() == TableSpec("t", 10, 8, optimizer=STILL, is_frozen=True)
