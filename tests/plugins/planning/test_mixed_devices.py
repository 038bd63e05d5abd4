"""Plans over ranks with devices and ranks on CPUs: against all plans there are, and what their documents say."""

from __future__ import annotations

import json

import attrs
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from tests.drawn import drawn
from tests.plugins.planning.test_cli_plan import run
from tests.plugins.proposers.spaces import best_by_trying_all

import shardwright as sw
from shardwright.errors import InvalidInputError, NoPlanError, PlanningError, UnsupportedError
from shardwright.planning.machines.topology import GIB, Topology
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.planner import TablePlanner
from shardwright.planning.tables.constraints import ParameterConstraints
from shardwright.planning.tables.spec import TableSpec
from shardwright_plugins.plan_differences.check import check_plan
from shardwright_plugins.plan_differences.compare import compare_plans
from shardwright_plugins.proposers.proving.effort import Effort

MIXED = ["cuda", "cuda", "cpu"]
COLD = [TableSpec(f"cold_{i}", 50_000_000, 64, ("f",)) for i in range(2)]
HOT = [TableSpec(f"hot_{i}", 10_000, 64, ("f",)) for i in range(4)]
IDS = {
    "hot_*": ParameterConstraints(pooling_factors=[20.0]),
    "cold_*": ParameterConstraints(pooling_factors=[1.0]),
}


def topology(devices=MIXED, *, hbm=8 * GIB, cpu=64 * GIB, **arguments):
    memory = [cpu if device == "cpu" else 0 for device in devices]
    return Topology(len(devices), devices, hbm_cap=hbm, ddr_cap=memory, **arguments)


def planned(tables, ranks, *, constraints=None, **arguments):
    planner = TablePlanner(
        ranks, 64, constraints=constraints, estimator="roofline", storage_reservation=0.0, **arguments
    )
    return planner.plan_tables(tables), planner.report


HOSTS = [
    (MIXED, None, ["table_wise", "row_wise", "data_parallel"]),
    (["cuda", "cuda", "cpu", "cpu"], 2, ["table_wise", "table_row_wise"]),
]


@drawn(
    st.lists(st.integers(100, 4000), min_size=1, max_size=2),
    st.integers(50_000, 1_500_000),
    st.integers(50_000, 3_000_000),
    st.sampled_from(["largest_rank_time", "serving"]),
    st.sampled_from(HOSTS),
    quick=8,
    thorough=80,
)
def test_mixed_plans_are_as_good_as_the_best_of_all_and_bounds_no_better(rows, hbm, cpu, objective, hosts):
    tables = [TableSpec(f"t{i}", count, 64, ("f",)) for i, count in enumerate(rows)]
    devices, local, names = hosts
    kernels = ["fused", "fused_numba"]
    types = {"*": ParameterConstraints(sharding_types=names, compute_kernels=kernels)}
    ranks = topology(devices, hbm=hbm, cpu=cpu, local_world_size=local)
    roomy = planned(
        tables, topology(devices, local_world_size=local), constraints=types, objective=objective
    )[1].space
    space = attrs.evolve(roomy, topology=ranks, capacity_bytes=ranks.capacity_bytes)
    best = best_by_trying_all(space)
    if not np.isfinite(best):
        with pytest.raises(NoPlanError):
            planned(tables, ranks, constraints=types, objective=objective)
        return
    plan, report = planned(tables, ranks, constraints=types, objective=objective)
    if objective == "serving":  # without a reservation there is the same room
        assert (report.space.capacity_bytes == ranks.capacity_bytes).all()
    assert best * (1 - 1e-9) <= report.plan.value_ms <= best * (1 + Effort().fine)
    assert report.result.lower_bound_ms <= best * (1 + 1e-9)
    found = check_plan(ShardingPlan.from_json(plan.to_json()))
    assert not found.problems


@pytest.mark.parametrize("objective", ["largest_rank_time", "serving"])
@pytest.mark.parametrize("estimator", ["roofline", "torchrec"])
def test_cold_tables_are_on_cpus_and_hot_ones_on_devices(objective, estimator):
    planner = TablePlanner(
        topology(hbm=4 * GIB), 64, constraints=IDS, estimator=estimator, objective=objective
    )
    plan = planner.plan_tables([*COLD, *HOT])
    for name, sharding in plan.plan[""].items():
        devices = {sharding.device_on(rank) for rank in sharding.ranks}
        assert devices == ({"cpu"} if name.startswith("cold") else {"cuda"}), name
    text, used = str(planner.report), planner.report.plan.used_bytes
    assert "cpu_ddr" in text
    tiers = planner.report.space.tiers
    assert not used[2, tiers.index("hbm")]
    assert not used[:2, tiers.index("cpu_ddr")].any()
    assert used[2, tiers.index("cpu_ddr")] > sum(
        4 * table.num_embeddings * table.embedding_dim for table in COLD
    )


def test_device_group_keeps_a_table_on_its_ranks():
    for device, ranks in (("cpu", {2}), ("cuda", {0, 1})):
        rule = {"*": ParameterConstraints(device_group=device, sharding_types=["row_wise"])}
        plan, _ = planned(HOT[:1], topology(), constraints=rule)
        assert set(plan.plan[""]["hot_0"].ranks) == ranks
    with pytest.raises(PlanningError, match="device_group 'mtia'"):
        planned(HOT[:1], topology(), constraints={"*": ParameterConstraints(device_group="mtia")})


def test_document_says_the_device_of_each_rank_and_sees_a_shard_on_the_wrong_one():
    whole = {"cold_*": attrs.evolve(IDS["cold_*"], sharding_types=["table_wise"]), "hot_*": IDS["hot_*"]}
    plan, _ = planned([*COLD, *HOT], topology(hbm=4 * GIB), constraints=whole)
    document = json.loads(plan.to_json())
    assert document["topology"]["compute_device"] == MIXED
    again = ShardingPlan.from_json(json.dumps(document))
    assert again == plan
    assert again.plan[""]["hot_0"].device_on(2) == "cpu"
    assert compare_plans(plan, again).changes == ()
    for shard in document["modules"][""]["cold_0"]["shards"]:
        shard["rank"] = 0
    moved = ShardingPlan.from_json(json.dumps(document))
    problems = check_plan(moved).problems
    assert any("cold_0" in problem and "no option" in problem for problem in problems)
    assert compare_plans(plan, moved).moved_bytes == 4 * COLD[0].num_embeddings * COLD[0].embedding_dim


def test_hosts_have_one_type_of_device_and_sums_stay_inside_them():
    devices = ["cuda"] * 2 + ["cpu"] * 2
    rule = {"*": ParameterConstraints(sharding_types=["table_row_wise"], device_group="cpu")}
    plan, report = planned(HOT[:1], topology(devices, local_world_size=2), constraints=rule)
    assert plan.plan[""]["hot_0"].ranks == [2, 3]
    assert not check_plan(ShardingPlan.from_json(plan.to_json())).problems
    assert report.plan.value_ms > 0


@pytest.mark.parametrize(
    ("devices", "arguments", "message"),
    [
        (["cuda", "cpu", "cuda"], {}, "Order the ranks by device"),
        (["cuda", "cuda", "cuda", "cpu"], {"local_world_size": 2}, "each has one type of device"),
        (MIXED, {"hbm_cap": [1, 1, 1]}, "rank 2, which has no device"),
        (MIXED, {"memory_bytes": {"cpu_ddr": 1}}, "given by ddr_cap"),
        (["cuda", "cpu"], {"world_size": 3}, "compute_device has 2 values for 3 ranks"),
        (["cuda", 3, "cpu"], {}, r"compute_device\[1\] must be a text"),
    ],
)
def test_mixed_topologies_that_cannot_be_are_refused(devices, arguments, message):
    arguments = {"world_size": len(devices), **arguments}
    with pytest.raises(InvalidInputError, match=message):
        Topology(compute_device=devices, **arguments)


def test_bandwidths_are_those_of_a_ranks_device():
    ranks = Topology(3, MIXED, hbm_mem_bw=9.0, ddr_mem_bw=5.0, memory_bandwidths={"cpu_ddr": 4.0})
    assert (ranks.read_bandwidth("device", "cuda"), ranks.read_bandwidth("device", "cpu")) == (9.0, 4.0)
    assert Topology.from_data(ranks.to_data()) == ranks
    assert Topology(3, MIXED, ddr_mem_bw=5.0).read_bandwidth("host", "cpu") == 5.0


def test_mixed_topology_has_no_single_device():
    with pytest.raises(UnsupportedError, match="cuda and cpu"):
        topology().compute_device  # noqa: B018
    with pytest.raises(UnsupportedError, match="name the device"):
        topology().read_bandwidth("device")
    with pytest.raises(InvalidInputError, match="one type of device"):
        topology(["cuda", "cpu"]).sharding_group(1)
    assert Topology(2, ["cpu", "cpu"]).compute_device == "cpu"


def test_sharder_that_allows_something_else_on_each_device_is_refused():
    class Choosy(sw.EmbeddingBagCollectionSharder):
        def compute_kernels(self, sharding_type, compute_device_type):
            return ["fused_numba" if compute_device_type == "cpu" else "fused"]

    bags = sw.EmbeddingBagCollection(
        [sw.EmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=64, feature_names=["f"])],
        device=torch.device("meta"),
    )
    planner = sw.EmbeddingShardingPlanner(topology(), 64)
    assert planner.plan(bags, [sw.EmbeddingBagCollectionSharder()]).plan[""]["t"].ranks
    with pytest.raises(UnsupportedError, match="on ranks of both it must allow the same"):
        planner.plan(bags, [Choosy()])


def test_command_plans_for_mixed_devices_and_compares(tmp_path):
    workload, document = tmp_path / "tables.json", tmp_path / "plan.json"
    tables = [{"name": "user", "num_embeddings": 100_000, "embedding_dim": 64, "pooling_factor": 3.0}]
    workload.write_text(json.dumps({"tables": tables}))
    page = tmp_path / "plan.html"
    options = ("--ranks", "3", "--device", "cuda,cuda,cpu", "--output", document, "--report", page)
    assert "cpu_ddr" in run("plan", workload, *options).stdout
    assert "3 on cuda and cpu" in page.read_text()
    run("check", document)
    run("diff", document, document)
    assert "cpu" in run("explain", document, "--table", "user").stdout
