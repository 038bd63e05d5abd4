from __future__ import annotations

import pytest

from shardwright.errors import PlanningError
from shardwright.host import host
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.enumeration import enumerate_options
from shardwright.planning.tables.constraints import Constraints, ParameterConstraints
from shardwright.planning.tables.optimizers import OptimizerSpec
from shardwright.planning.tables.spec import TableSpec
from shardwright.runtime.sharded.models.planner import EmbeddingShardingPlanner


def options_of(table, topology, *, batch_size=1, **rule):
    rules = Constraints({table.name: ParameterConstraints(**rule)})
    return enumerate_options([table], topology, rules, host(), batch_size=batch_size)


@pytest.mark.parametrize(
    ("optimizer", "state_bytes"),
    [("sgd", lambda rows, dim: 0), ("adagrad", lambda rows, dim: 4 * rows * dim)],
)
def test_weights_and_buffers_count_weights_state_input_and_output(optimizer, state_bytes):
    topology = Topology(2, "cuda")
    table = TableSpec("t", 1000, 64, ["f"], optimizer=OptimizerSpec(optimizer))
    options = options_of(
        table,
        topology,
        batch_size=10,
        pooling_factors=[3],
        sharding_types=["table_wise"],
        compute_kernels=["fused", "fused_torch"],
    )
    used = host().estimators.create("weights_and_buffers").estimate(options, topology)
    ids, bags = 2 * 10 * 3, 2 * 10
    expected = 1000 * 64 * 4 + state_bytes(1000, 64) + ids * 8 + bags * 64 * 4
    assert set(used["hbm"].tolist()) == {expected}
    assert not used["ddr"].any()


def test_weights_and_buffers_of_an_empty_shard_are_nothing():
    topology = Topology(4, "cpu")
    options = options_of(TableSpec("t", 2, 64, ["f"]), topology, batch_size=10, sharding_types=["row_wise"])
    used = host().estimators.create("weights_and_buffers").estimate(options, topology)["ddr"]
    # One row of two: half of 40 ids, and a vector for each bag that has one.
    assert options.spread(used, 0).tolist() == [64 * 4 + 20 * 8 + 20 * 64 * 4] * 2 + [0, 0]


@pytest.mark.parametrize(("rows", "synchronised"), [(10_000, 2 * 10 * (3 * 8 + 64 * 4)), (7, 7 * 64 * 4)])
def test_weights_and_buffers_of_a_copy_are_whole_on_every_rank_and_those_of_its_own_batch(rows, synchronised):
    topology = Topology(2, "cuda")
    table = TableSpec("t", rows, 64, ["f"], optimizer=OptimizerSpec("sgd"))
    options = options_of(
        table,
        topology,
        batch_size=10,
        pooling_factors=[3],
        sharding_types=["data_parallel"],
        compute_kernels=["fused"],
    )
    used = host().estimators.create("weights_and_buffers").estimate(options, topology)["hbm"]
    # Synchronised by the batches of both ranks or by the dense gradient, whichever is less.
    assert options.spread(used, 0).tolist() == [rows * 64 * 4 + 10 * 3 * 8 + 10 * 64 * 4 + synchronised] * 2


@pytest.mark.parametrize(("ranks", "num_sums"), [(4, 4 * (1 - 0.75**3)), (8, 8 + 2)])
def test_weights_and_buffers_of_sums_inside_a_host_hold_the_partial_sums_and_those_that_cross(
    ranks, num_sums
):
    topology = Topology(ranks, "cpu", local_world_size=4)
    table = TableSpec("t", 40, 64, ["f"], optimizer=OptimizerSpec("sgd"))
    options = options_of(
        table,
        topology,
        batch_size=10,
        pooling_factors=[3],
        sharding_types=["table_row_wise"],
        compute_kernels=["fused"],
    )
    used = host().estimators.create("weights_and_buffers").estimate(options, topology)["ddr"]
    assert (
        options.spread(used, 0).tolist()
        == [10 * 64 * 4 + ranks * 10 * 3 / 4 * 8 + num_sums * 10 * 64 * 4] * 4
    )


@pytest.mark.parametrize("estimator", ["roofline", "torchrec"])
def test_estimates_that_no_number_holds_are_refused_without_a_warning(estimator):
    planner = EmbeddingShardingPlanner(Topology(2, "cuda", intra_host_bw=1e-320), estimator=estimator)
    with pytest.raises(PlanningError, match="estimates must be finite"):
        planner.plan_tables([TableSpec("t", 1000, 64, ["f"])])
