from __future__ import annotations

import numpy as np
import pytest

from shardwright.planning.constraints import Constraints, ParameterConstraints
from shardwright.planning.enumeration import enumerate_options
from shardwright.planning.optimizers import OptimizerSpec
from shardwright.planning.tables import DataType, TableSpec
from shardwright.planning.topology import Topology
from shardwright.plugins import host

# What TorchRec 1.8.0 says of these tables (rows, columns, ids per bag of each feature) with its fused kernel and CUDA
# topology, milliseconds for one shard: EmbeddingEnumerator(...).enumerate, shard.perf.
TABLES = {"narrow": (1000, 16, [1.0]), "middle": (5003, 64, [3.5, 0.25]), "wide": (100_000, 256, [20.0])}
# ranks, ranks a host, weighted, batch size, table, type, shards: forward and backward, compute and communication.
TORCHREC = [
    (
        (2, 2, False, 512, "narrow", "table_wise", 1),
        (0.00037211372435026475, 0.00010172526041666667, 0.0007442274487005295, 0.00010172526041666667),
    ),
    (
        (2, 2, False, 512, "narrow", "row_wise", 2),
        (0.0001063182069572185, 0.00010172526041666667, 0.000212636413914437, 0.0002687724271878484),
    ),
    (
        (2, 2, False, 512, "middle", "table_wise", 1),
        (0.0016016837878104965, 0.0005086263020833334, 0.003203367575620993, 0.0005086263020833334),
    ),
    (
        (2, 2, False, 512, "middle", "row_wise", 2),
        (0.0008664933867013308, 0.0005086263020833334, 0.0017329867734026615, 0.001343862135939242),
    ),
    (
        (2, 2, False, 512, "wide", "column_wise", 2),
        (0.011601442743171684, 0.0008138020833333334, 0.023202885486343368, 0.0008138020833333334),
    ),
    (
        (8, 4, False, 4096, "narrow", "table_wise", 1),
        (0.011907639179208472, 0.15625, 0.023815278358416944, 0.15625),
    ),
    (
        (8, 4, False, 4096, "middle", "row_wise", 8),
        (0.015097185387925028, 0.78125, 0.030194370775850056, 0.8079775466833891),
    ),
    ((8, 4, False, 4096, "wide", "table_wise", 1), (0.7370488433667781, 2.5, 1.4740976867335562, 2.5)),
    (
        (8, 4, False, 4096, "wide", "row_wise", 8),
        (0.12261466171962096, 2.5, 0.24522932343924192, 2.585528149386845),
    ),
    ((8, 4, False, 4096, "wide", "column_wise", 2), (0.3712461677814939, 1.25, 0.7424923355629878, 1.25)),
    (
        (4, 4, True, 100, "narrow", "row_wise", 4),
        (3.488566165783732e-05, 3.973642985026042e-05, 0.00010814555113929569, 0.00010498922937025328),
    ),
    (
        (4, 4, True, 100, "middle", "table_wise", 1),
        (0.0006399857692229442, 0.0001986821492513021, 0.001983955884591127, 0.0001986821492513021),
    ),
    (
        (4, 4, True, 100, "wide", "row_wise", 4),
        (0.002584861406647375, 0.0006357828776041667, 0.008013070360606863, 0.0016798276699240525),
    ),
    (
        (4, 4, True, 100, "wide", "column_wise", 2),
        (0.0045982624508997, 0.00031789143880208337, 0.014254613597789071, 0.00031789143880208337),
    ),
    (
        (4, 4, False, 512, "narrow", "table_row_wise", 4),
        (0.00017436185940983834, 0.00020345052083333334, 0.0003487237188196767, 0.0005375448543756968),
    ),
    (
        (8, 4, False, 4096, "middle", "table_row_wise", 4),
        (0.01930738638343088, 0.21158854166666666, 0.03861477276686176, 0.23831608835005574),
    ),
    (
        (8, 2, True, 100, "wide", "table_row_wise", 2),
        (0.009488899970931752, 0.031789143880208336, 0.029415589909888434, 0.033877233464848104),
    ),
    (
        (4, 1, False, 100, "narrow", "table_row_wise", 1),
        (5.648154744602233e-05, 0.0019470850626627605, 0.00011296309489204466, 0.0020123378621827535),
    ),
    (
        (1, 1, False, 512, "middle", "table_row_wise", 1),
        (0.0006963842555697812, 0.0002543131510416667, 0.0013927685111395625, 0.000671931067969621),
    ),
    (
        (8, 4, False, 512, "wide", "grid_shard", 8),
        (0.01323449040203456, 0.042317708333333336, 0.02646898080406912, 0.04766321767001115),
    ),
    (
        (16, 4, True, 512, "wide", "grid_shard", 16),
        (0.013744817795429208, 0.042317708333333336, 0.042608935165830544, 0.04766321767001115),
    ),
    (
        (8, 4, False, 4096, "wide", "table_column_wise", 2),
        (0.3712461677814939, 1.25, 0.7424923355629878, 1.25),
    ),
    (
        (4, 4, True, 100, "wide", "table_column_wise", 2),
        (0.0045982624508997, 0.00031789143880208337, 0.014254613597789071, 0.00031789143880208337),
    ),
    # TorchRec has only its dense kernel for this type, at half of the bandwidth; so has fused_torch here.
    (
        (1, 1, False, 512, "narrow", "data_parallel", 1),
        (0.00014459276146181716, 0, 0.0002891855229236343, 0.005993688917213193),
    ),
    (
        (2, 2, False, 512, "middle", "data_parallel", 2),
        (0.0013927685111395625, 0, 0.002785537022279125, 0.07223337656146574),
    ),
    (
        (8, 4, True, 4096, "middle", "data_parallel", 8),
        (0.011397311785813824, 0, 0.035331666536022856, 0.060305295049014565),
    ),
    (
        (16, 4, False, 100, "wide", "data_parallel", 16),
        (0.004498589131877308, 0, 0.008997178263754615, 7.68255363472861),
    ),
]
# For sequences: TorchRec shards them by no other of the types above.
TORCHREC_SEQUENCES = [
    (
        (8, 4, False, 4096, "middle", "data_parallel", 8),
        (0.016585640285326088, 0, 0.033171280570652176, 0.060305295049014565),
    ),
]
PHASES = ("forward_compute", "forward_communication", "backward_compute", "backward_communication")


def options_of(table, topology, *, batch_size=1, **rule):
    rules = Constraints({table.name: ParameterConstraints(**rule)})
    return enumerate_options([table], topology, rules, host(), batch_size=batch_size)


@pytest.mark.parametrize(
    ("pooling_type", "case", "phases"),
    [("SUM", *row) for row in TORCHREC] + [("NONE", *row) for row in TORCHREC_SEQUENCES],
)
def test_torchrec_estimates_are_torchrecs(pooling_type, case, phases):
    ranks, local, weighted, batch_size, name, kind, num_shards = case
    rows, dim, pooling = TABLES[name]
    topology = Topology(ranks, "cuda", local_world_size=local)
    features = [f"f{i}" for i in range(len(pooling))]
    table = TableSpec(name, rows, dim, features, pooling=pooling_type, is_weighted=weighted)
    num_blocks = num_shards // local if kind == "grid_shard" else num_shards
    options = options_of(
        table,
        topology,
        batch_size=batch_size,
        pooling_factors=pooling,
        sharding_types=[kind],
        compute_kernels=["fused_torch" if kind == "data_parallel" else "fused"],
        min_partition=dim // num_blocks,
    )
    # Of several cuts, the fewest blocks; TorchRec offers the one asked for.
    option = options.num_options - 1 if kind == "grid_shard" else 0
    assert options.shards_per_option[option] == num_shards
    estimated = host().estimators.create("torchrec").estimate(options, topology)
    assert tuple(estimated) == PHASES
    for phase, value in zip(PHASES, phases, strict=True):
        np.testing.assert_allclose(options.spread(estimated[phase], option), value, rtol=1e-9)


def test_torchrec_slower_kernel_takes_longer_to_compute_and_as_long_to_communicate():
    topology = Topology(2, "cpu")
    table = TableSpec("t", 1000, 64, ["f"])
    options = options_of(
        table,
        topology,
        sharding_types=["table_wise"],
        compute_kernels=["fused_torch", "dense"],
        batch_size=64,
    )
    estimated = host().estimators.create("torchrec").estimate(options, topology)
    requests = [options.requests[code] for code in options.request]
    speed = np.array(
        [options.compute_kernels[kernel].bandwidth_fraction(request) for kernel, request in requests]
    )
    products = estimated["forward_compute"] * speed
    np.testing.assert_allclose(products, products[0])
    assert len(set(estimated["forward_communication"])) == 1


@pytest.mark.parametrize(
    ("optimizer", "state_bytes"),
    [("sgd", lambda rows, dim: 0), ("adagrad", lambda rows, dim: 4 * rows * dim)],
)
def test_weights_and_buffers_count_weights_state_input_and_output(optimizer, state_bytes):
    topology = Topology(2, "cuda")
    table = TableSpec("t", 1000, 64, ["f"], optimizer=OptimizerSpec(optimizer))
    options = options_of(table, topology, batch_size=10, pooling_factors=[3], sharding_types=["table_wise"])
    used = host().estimators.create("weights_and_buffers").estimate(options, topology)
    ids, bags = 2 * 10 * 3, 2 * 10
    expected = 1000 * 64 * 4 + state_bytes(1000, 64) + ids * 8 + bags * 64 * 4
    assert set(used["hbm"].tolist()) == {expected}
    assert not used["ddr"].any()


def test_weights_and_buffers_of_an_empty_shard_are_nothing():
    topology = Topology(4, "cpu")
    options = options_of(TableSpec("t", 2, 64, ["f"]), topology, batch_size=10, sharding_types=["row_wise"])
    used = host().estimators.create("weights_and_buffers").estimate(options, topology)["ddr"]
    # One row of two: half of 40 ids, and a vector for each bag all the same.
    assert options.spread(used, 0).tolist() == [64 * 4 + 20 * 8 + 40 * 64 * 4] * 2 + [0, 0]


def test_weights_and_buffers_of_half_precision_are_half():
    topology = Topology(2, "cuda")
    used = [
        host().estimators.create("weights_and_buffers").estimate(options, topology)["hbm"][0]
        for data_type in (DataType.FP32, DataType.FP16)
        for options in [
            options_of(
                TableSpec("t", 1000, 64, ["f"], data_type=data_type),
                topology,
                pooling_factors=[0],
                sharding_types=["table_wise"],
                compute_kernels=["fused"],
            )
        ]
    ]
    assert used[0] == 2 * used[1] == 1000 * 64 * 4


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


@pytest.mark.parametrize(("ranks", "num_sums"), [(4, 4), (8, 8 + 2)])
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
