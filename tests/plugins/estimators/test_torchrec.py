"""The models of TorchRec: their numbers are TorchRec's, kept in torchrec_golden.json or asked of TorchRec itself."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.plugins.estimators.torchrec_cases import (
    ALL_TYPES,
    GOLDEN,
    SMALL,
    TABLES,
    Case,
    ask_torchrec,
    compare,
    our_options,
    workload_cases,
)

from shardwright.host import host
from shardwright.planning.machines.topology import Topology
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.tables.constraints import ParameterConstraints
from shardwright.planning.tables.optimizers import OptimizerSpec
from shardwright.planning.tables.option_space import OptionSpace
from shardwright.planning.tables.spec import TableSpec
from shardwright.runtime.sharded.models.planner import EmbeddingShardingPlanner
from shardwright_plugins.plan_differences.check import check_plan
from shardwright_plugins.plan_differences.rederived import Rederived

TOLERATED = 1e-6
CASES = json.loads(GOLDEN.read_text())
# A Python with TorchRec, and a folder of workload files: {"tables": [{"name", "num_embeddings", ...}]}.
PYTHON = os.environ.get("SHARDWRIGHT_TORCHREC_PYTHON") or (
    sys.executable if importlib.util.find_spec("torchrec") else None
)
WORKLOADS = (
    sorted(Path(os.environ["SHARDWRIGHT_WORKLOADS"]).glob("*.json"))
    if "SHARDWRIGHT_WORKLOADS" in os.environ
    else []
)
needs_torchrec = pytest.mark.skipif(
    PYTHON is None, reason="SHARDWRIGHT_TORCHREC_PYTHON names no Python with TorchRec"
)


def is_left_out_on_purpose(case, missing):
    """What TorchRec offers and we do not: a column cut into one block unasked, which is another table_wise; and a
    row-wise optimizer on columns cut with a kernel that sees its own columns only, which trains something else."""
    kind, shards = missing.split(" ")[1], missing.count("), (") + 1
    one_block = case["sharding_types"] is None and "column" in kind and shards == 1
    cuts_columns = ("column" in kind and shards > 1) or kind == "grid_shard"
    return one_block or (case["optimizer"] == "row_wise_adagrad" and cuts_columns)


def check(case):
    found = compare(case)
    assert found.deviation < TOLERATED
    assert [text for text in found.missing if not is_left_out_on_purpose(case, text)] == []
    assert found.num_options > len(found.missing)
    return found


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_torchrec_estimates_are_the_golden_numbers(case):
    check(case)


def test_torchrec_golden_numbers_have_each_type_kernel_and_phase():
    options = [option for case in CASES for option in case["options"]]
    assert {kind for _, kind, _, _ in options} == set(ALL_TYPES)
    assert {kernel for _, _, kernel, _ in options} == {"dense", "fused", "fused_uvm", "fused_uvm_caching"}
    shards = np.array([shard for *_, shards in options for shard in shards], dtype=float)
    assert (shards.max(axis=0) > 0).all()  # forward, backward, communication, prefetch, HBM, DDR


@needs_torchrec
@pytest.mark.slow
def test_torchrec_golden_numbers_are_what_torchrec_says():
    assert ask_torchrec(SMALL, PYTHON) == CASES


@needs_torchrec
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", WORKLOADS, ids=lambda path: path.stem)
def test_torchrec_estimates_of_a_workload_are_torchrecs(path, record_property):
    for case in ask_torchrec(workload_cases(path), PYTHON):
        found = check(case)
        record_property(f"deviation_{case['ranks']}", found.deviation)


def test_torchrec_space_is_that_of_the_published_enumerator():
    topology = Topology(8, "cuda")
    options = our_options(as_data(Case(TABLES, sharding_types=None)), topology)
    offered = {(options.type_of(o).name, options.kernel_of(o).name) for o in range(options.num_options)}
    sharded = {"table_wise", "column_wise", "table_column_wise", "row_wise", "table_row_wise"}
    kernels = {"fused", "fused_uvm", "fused_uvm_caching"}
    expected = {(kind, kernel) for kind in sharded for kernel in kernels} | {("data_parallel", "dense")}
    assert offered == expected
    cut = options.num_columns < np.array([t.embedding_dim for t in options.tables])[options.shard_table]
    assert options.num_columns[cut].min() == 128


def as_data(case):
    import attrs

    return attrs.asdict(case)


def plan_of(parts, **rule):
    table = TableSpec("t", 1000, 64, ["f"])
    planner = EmbeddingShardingPlanner(
        Topology(4, "cuda"), 64, constraints={"t": ParameterConstraints(**rule)}, **parts
    )
    return planner.plan_tables([table]), planner.report


AS_TORCHREC = {
    "estimator": "torchrec:published_options=true",
    "storage_estimator": "torchrec_storage",
}


def test_torchrec_with_its_options_plans_with_its_storage_model_and_its_options():
    plan, report = plan_of(AS_TORCHREC, sharding_types=["data_parallel"])
    assert plan.plan[""]["t"].compute_kernel == "dense"
    # TorchRec's model counts weights and buffers; the gradient and state of a dense kernel are not in it.
    used = report.result.plan.used_bytes[0, 0]
    assert used == 1000 * 64 * 4 + 64 * 8 + 64 * 64 * 4


@pytest.mark.parametrize("name", ["torchrec", "roofline"])
def test_estimator_named_leaves_the_options_and_the_storage_model_as_they_are(name):
    plan, report = plan_of({"estimator": name}, sharding_types=["data_parallel"])
    assert plan.plan[""]["t"].compute_kernel == "fused"
    assert report.inputs["storage_estimator"]["value"] == "weights_and_buffers"


def test_option_space_is_recorded_and_had_again_from_the_document():
    table = TableSpec("t", 1000, 64, ["f"])
    few = OptionSpace({"table_wise": (), "row_wise": ("fused",)}, min_partition=16)
    for chosen in ({"estimator": AS_TORCHREC["estimator"]}, {"option_space": few}):
        planner = EmbeddingShardingPlanner(Topology(4, "cuda"), 64, **chosen)
        plan = ShardingPlan.from_json(planner.plan_tables([table]).to_json())
        again = Rederived.of(plan, host())
        assert again.options.num_options == planner.report.space.options.num_options
        assert check_plan(plan).problems == []
    assert "options: an option space of the caller's" in str(planner.report)
    options = again.options
    offered = [(options.type_of(o).name, options.kernel_of(o).name) for o in range(options.num_options)]
    assert "table_wise" not in [kind for kind, _ in offered]
    assert {kernel for kind, kernel in offered if kind == "row_wise"} == {"fused"}


@pytest.mark.parametrize(
    ("optimizer", "state_bytes"),
    [("sgd", 0), ("adagrad", 1000 * 64 * 4), ("row_wise_adagrad", 1000 * 4), ("adam", 2 * 1000 * 64 * 4)],
)
def test_torchrec_storage_counts_the_optimizer(optimizer, state_bytes):
    table = TableSpec("t", 1000, 64, ["f"], optimizer=OptimizerSpec(optimizer))
    planner = EmbeddingShardingPlanner(
        Topology(1, "cuda"),
        1,
        storage_estimator="torchrec_storage",
        constraints={"t": ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])},
    )
    planner.plan_tables([table])
    buffers = 8 + 64 * 4
    assert planner.report.result.plan.used_bytes[0, 0] == 1000 * 64 * 4 + state_bytes + buffers
