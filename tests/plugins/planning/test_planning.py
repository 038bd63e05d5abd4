"""The planner with the built-in plugins: tutorials, determinism, a stranger's sharding type, serving."""

from __future__ import annotations

import hashlib
import json
import os
import random
import types

import attrs
import pytest
from hypothesis import strategies as st
from tests.drawn import drawn
from tests.own_rows import SCALE, Bringing, OwnRows, kernel_of
from tests.programs import printed_by

import shardwright as sw
from shardwright import hookimpl
from shardwright.contracts import ShardingType
from shardwright.errors import InvalidInputError, NoPlanError, PlanningError
from shardwright.host import PluginHost, use_host
from shardwright.planning.layouts.layout import Block, Layout
from shardwright.planning.layouts.row_maps import RowsModulo
from shardwright.planning.machines.topology import GIB, Topology
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.planner import TablePlanner
from shardwright.planning.tables.constraints import ParameterConstraints
from shardwright.planning.tables.optimizers import OptimizerSpec
from shardwright.planning.tables.spec import TableSpec
from shardwright.runtime.sharded.models.planner import EmbeddingShardingPlanner
from shardwright_plugins.plan_differences.check import check_plan

SMALL = TableSpec("small_table", 10_000_000, 64, ["small_table_feature"])
HUGE = TableSpec("huge_table", 50_000_000, 1024, ["large_table_feature"])


def plan(table, *, ranks=2, device="cuda", **arguments):
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=ranks, compute_device=device), **arguments
    )
    return planner.plan_tables([table]), planner.report


def test_step_time_is_the_sum_of_each_phases_slowest_rank():
    # One table is long to look up, the other to send: each phase has another slowest rank.
    tables = [TableSpec("deep", 1000, 16, ["f"]), TableSpec("wide", 1000, 512, ["g"])]
    rules = {
        "deep": ParameterConstraints(ranks=[0], pooling_factors=[400.0]),
        "wide": ParameterConstraints(ranks=[1], pooling_factors=[1.0]),
    }
    values = {}
    for objective in ("largest_rank_time", "step_time"):
        planner = EmbeddingShardingPlanner(Topology(2, "cuda"), constraints=rules, objective=objective)
        planner.plan_tables(tables)
        data = planner.report.to_data()
        phases = [rank["phases_ms"] for rank in data["ranks"]]
        values[objective] = data["objective"]["value_ms"]
    assert values["step_time"] == pytest.approx(sum(max(p[name] for p in phases) for name in phases[0]))
    assert values["largest_rank_time"] == pytest.approx(max(sum(p.values()) for p in phases))
    assert values["step_time"] > 1.01 * values["largest_rank_time"]


class RoundRobinRows(ShardingType):
    """A stranger's type: row r on rank r % world_size."""

    name, abbreviation = "round_robin_rows", "RR"

    def layouts(self, table, topology, constraints):
        rows = RowsModulo(table.num_embeddings, parts=topology.world_size)
        yield Layout(
            [Block(part, table.all_columns, rank=rank) for rank, part in enumerate(rows)], extras={"seed": 7}
        )


def test_strangers_type_goes_through_planner_document_and_report():
    module = types.ModuleType("acme")
    module.shardwright_sharding_types = hookimpl(lambda: [RoundRobinRows])
    rule = ParameterConstraints(sharding_types=["round_robin_rows"])
    with use_host(PluginHost(plugins={"acme": module}, environment={})):
        made, report = plan(SMALL, constraints={"small_*": rule}, ranks=3)
        again = ShardingPlan.from_json(made.to_json())
    assert again == made
    entry = json.loads(made.to_json())["modules"][""]["small_table"]
    assert entry["row_map"] == {"name": "modulo", "num_rows": 10_000_000, "parts": 3}
    assert entry["extras"] == {"seed": 7}
    assert "RR (round_robin_rows)" in str(report)


PLAN_IN_A_PROCESS = """
import sys
from shardwright.planning.tables.constraints import ParameterConstraints
from shardwright.runtime.sharded.models.planner import EmbeddingShardingPlanner
from shardwright.planning.tables.spec import TableSpec
from shardwright.planning.machines.topology import GIB, Topology
tables = [TableSpec(f"t{i}", 97 * (i + 1) ** 3, (16, 64, 128)[i % 3], [f"f{i}"]) for i in range(20)]
rules = {"t1*": ParameterConstraints(pooling_factors=[7.0])}
planner = EmbeddingShardingPlanner(Topology(4, "cuda", hbm_cap=500_000_000), constraints=rules)
plan = planner.plan_tables(tables)
print(plan.to_json())
assert "torch" not in sys.modules, "planning imported torch"
"""


@pytest.mark.slow
def test_plan_is_the_same_under_any_hash_seed_and_imports_no_torch():
    digests = set()
    for seed in ("1", "4242"):
        printed = printed_by("-c", PLAN_IN_A_PROCESS, env={**os.environ, "PYTHONHASHSEED": seed})
        lines = [line for line in printed.splitlines() if not line.startswith('  "seconds": ')]
        assert len(lines) == printed.count("\n") - 1  # how long it took
        digests.add(hashlib.sha256("\n".join(lines).encode()).hexdigest())
    assert len(digests) == 1


def test_huge_table_of_the_tutorial_in_device_memory_has_no_plan_and_the_error_says_what_has():
    rule = ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])
    text = r"'huge_table' \(50_000_000 x 1024 FP32\) needs 95\.4 GiB.*'fused_uvm_caching'.*allow it in constraints"
    with pytest.raises(NoPlanError, match=text):
        plan(HUGE, constraints={"huge_table": rule})


SHAPES = st.tuples(
    st.integers(1, 400_000), st.sampled_from([8, 16, 64, 128, 256]), st.sampled_from(["", "m", "n.o"])
)


def planned(tables: list[sw.TableSpec], ranks: int) -> sw.ShardingPlan:
    topology = sw.Topology(ranks, "cuda", hbm_cap=1 << 30, local_world_size=2)
    rules = {
        "t1": sw.ParameterConstraints(apart="x"),
        "t2*": sw.ParameterConstraints(apart="x", pooling_factors=[9.0]),
    }
    known = {table.name for table in tables}
    rules = {key: rule for key, rule in rules.items() if key.removesuffix("*") in known}
    return sw.EmbeddingShardingPlanner(topology, 512, constraints=rules).plan_tables(tables)


@drawn(
    st.lists(SHAPES, min_size=2, max_size=9),
    st.sampled_from([2, 4, 8]),
    st.randoms(use_true_random=False),
    quick=1,
    thorough=12,
)
def test_plan_is_the_same_in_any_order_of_tables(
    shapes: list[tuple[int, int, str]], ranks: int, dice: random.Random
) -> None:
    tables = [
        sw.TableSpec(f"t{i}", rows, dim, [f"f{i}"], module=path) for i, (rows, dim, path) in enumerate(shapes)
    ]
    first = planned(tables, ranks)
    for _ in range(2):
        dice.shuffle(tables)
        again = planned(tables, ranks)
        assert again == first
        assert again.document["objective"] == first.document["objective"]
        assert [(path, name) for path, module in again.plan.items() for name in module] == [
            (table.module, table.name) for path in again.plan for table in tables if table.module == path
        ]


def test_plan_of_tables_that_cost_the_same_is_the_same_in_any_order() -> None:
    """Where many plans are equally good, ties decide."""
    tables = [sw.TableSpec(f"t{i}", 1000, 64, [f"f{i}"]) for i in range(11)]
    tables.append(attrs.evolve(tables[0], name="t11", num_embeddings=1001))
    first = planned(tables, 4)
    assert planned(tables[::-1], 4) == first
    assert planned(tables[5:] + tables[:5], 4) == first


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
