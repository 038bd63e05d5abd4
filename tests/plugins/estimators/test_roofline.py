"""The roofline against sums made by hand, and each of the things that it counts."""

from __future__ import annotations

import math

import attrs
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from tests.equality import Case, Table

from shardwright.host import host
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.enumeration import enumerate_options
from shardwright.planning.options.search_space import vector_bytes
from shardwright.planning.tables.caching import CacheParams, EmbeddingOffloadStats
from shardwright.planning.tables.codecs import QCommsConfig
from shardwright.planning.tables.constraints import Constraints, ParameterConstraints
from shardwright.planning.tables.optimizers import OptimizerSpec
from shardwright.planning.tables.spec import TableSpec
from shardwright_testing.equality.cases import shard_case
from shardwright_testing.simulated import run_simulated

ROWS, COLUMNS, BATCH, POOLING = 1000, 64, 32, 5.0
IDS, BAGS = BATCH * POOLING, BATCH
HBM, LINK, INSIDE, ACROSS, LATENCY_INSIDE, LATENCY_ACROSS = 1e6, 1e4, 1e5, 1e3, 0.25, 0.5


def topology_of(ranks=4, local=2):
    return Topology(
        ranks,
        "cuda",
        local_world_size=local,
        hbm_mem_bw=HBM,
        hbm_to_ddr_mem_bw=LINK,
        intra_host_bw=INSIDE,
        inter_host_bw=ACROSS,
        link_latencies_ms={"intra_host": LATENCY_INSIDE, "inter_host": LATENCY_ACROSS},
    )


def phases(kind, *, kernel="fused", topology=None, rows=ROWS, columns=COLUMNS, **table):
    """Of each shard of the first option of one table."""
    topology = topology or topology_of()
    spec = TableSpec("t", rows, columns, ["f"], **table)
    rule = ParameterConstraints(
        sharding_types=[kind], compute_kernels=[kernel], pooling_factors=[POOLING], min_partition=columns
    )
    options = enumerate_options([spec], topology, Constraints({"t": rule}), host(), batch_size=BATCH)
    estimated = host().estimators.create("roofline").estimate(options, topology)
    return {name: np.repeat(column, options.count) for name, column in estimated.items()}


@pytest.mark.parametrize(("optimizer", "times"), [("sgd", 1), ("row_wise_adagrad", 2)])
def test_gradients_of_cut_columns_are_counted_as_they_travel(optimizer, times):
    """Row-wise optimizers need the gradients of whole rows in each of the two column blocks."""
    case = Case([Table(50, 64, ("f",), "SUM", "column_wise", "fused_torch")], (6, 6), optimizer)
    module = case.module_to_shard()

    def step(env):
        sharded = shard_case(case, env, module)
        first = len(env.communicator.sent_bytes)
        values = case.output(sharded(case.batch(0, env.rank)))
        values.backward(torch.ones_like(values))
        return sum(
            sum(own) for label, own in env.communicator.sent_bytes[first:] if label.startswith("gradients")
        )

    rule = ParameterConstraints(sharding_types=["column_wise"], compute_kernels=["fused_torch"])
    tables = [TableSpec("t", 50, 64, ["f"], optimizer=OptimizerSpec(optimizer))]
    options = enumerate_options(tables, Topology(2, "cpu"), Constraints({"t": rule}), host(), batch_size=6)
    two = next(own for own in range(options.num_options) if options.count[options.shards_of(own)].sum() == 2)
    runs = options.shards_of(two)
    a_vector = float((vector_bytes(options)[1] * options.count)[runs].sum())
    assert 12 * a_vector == sum(run_simulated(step, 2)) == 12 * 4 * 64 * times


def test_roofline_of_a_whole_table_is_the_sum_made_by_hand():
    found = phases("table_wise", optimizer=OptimizerSpec("adagrad"))
    ids, vectors, row = 4 * IDS, 4 * BAGS, COLUMNS * 4
    incoming = ids * 8 + vectors * 4
    # Of four ranks one is itself, one is on its host, two are on the other.
    results = vectors * row
    assert found["input_communication"] == pytest.approx([incoming / 2 / ACROSS + 2 * LATENCY_ACROSS])
    assert found["forward_communication"] == pytest.approx([results / 2 / ACROSS + LATENCY_ACROSS])
    assert found["backward_communication"] == pytest.approx(found["forward_communication"])
    assert found["forward_compute"] == pytest.approx([(incoming + results + ids * row) / HBM])
    distinct = ROWS * (1 - math.exp(-ids / ROWS))
    updated = ids * 96 + ids * row + 2 * distinct * (row + row)
    assert found["backward_compute"] == pytest.approx([updated / HBM])


def test_roofline_of_sums_inside_a_host_cross_hosts_once():
    found = phases("table_row_wise")
    inside = 4 * BAGS * COLUMNS * 4 / 2 / INSIDE
    across = BAGS * COLUMNS * 4 / ACROSS
    expected = inside + across + LATENCY_INSIDE + LATENCY_ACROSS
    assert found["forward_communication"] == pytest.approx([expected] * 2)


def test_roofline_of_a_copy_sends_nothing_but_what_keeps_it_equal():
    found = phases("data_parallel")
    assert not found["input_communication"].any()
    assert not found["forward_communication"].any()
    of_all_batches = 4 * (IDS * 8 + BAGS * COLUMNS * 4)
    assert of_all_batches < ROWS * COLUMNS * 4
    assert found["backward_communication"] == pytest.approx(
        [of_all_batches / 2 / ACROSS + LATENCY_ACROSS] * 4
    )


def test_roofline_tables_share_the_latency_of_collectives():
    topology = topology_of()
    tables = [TableSpec(f"t{i}", ROWS, COLUMNS, ["f"]) for i in range(5)]
    rules = Constraints({"*": ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])})
    options = enumerate_options(tables, topology, rules, host(), batch_size=BATCH)
    found = host().estimators.create("roofline").estimate(options, topology)
    travel = 4 * BATCH * COLUMNS * 4 / 2 / ACROSS
    assert found["forward_communication"] == pytest.approx([travel + LATENCY_ACROSS / 5])


def test_roofline_narrow_rows_cost_whole_cache_lines():
    narrow, wide = (phases("table_wise", columns=columns)["forward_compute"] for columns in (4, 16))
    assert wide - narrow == pytest.approx([4 * BAGS * 12 * 4 / HBM])  # the results alone


def test_roofline_dense_gradients_touch_every_row():
    fused, dense = (phases("table_wise", kernel=kernel, rows=10**6) for kernel in ("fused", "dense"))
    every = 4 * 10**6 * COLUMNS * 4 / (0.5 * HBM)
    assert dense["backward_compute"][0] > every > 10 * fused["backward_compute"][0]


def test_roofline_misses_of_a_cache_cross_the_link_from_the_host():
    stats = EmbeddingOffloadStats(0.1, 1000, [90, 8, 2, 0, 0], ROWS)
    caches = [CacheParams(0.21), CacheParams(0.21, stats=stats), CacheParams(0.41, stats=stats)]
    found = [
        phases("table_wise", kernel="fused_uvm_caching", cache=cache)["forward_compute"][0]
        for cache in caches
    ]
    ids, row = 4 * IDS, COLUMNS * 4
    streamed = (ids * 8 + 4 * BAGS * 4 + 4 * BAGS * row) / (0.1 * HBM)
    for time, missed in zip(found, (0.79, 0.02, 0.0), strict=True):
        rows = ids * row * ((1 - missed) / HBM + missed / LINK) / 0.1
        assert time == pytest.approx(streamed + rows)


@pytest.mark.parametrize(
    ("forward", "backward", "result_bytes", "gradient_bytes"),
    [
        (None, None, 4 * COLUMNS, 4 * COLUMNS),
        ("fp16", None, 2 * COLUMNS, 4 * COLUMNS),
        (None, "bf16", 4 * COLUMNS, 2 * COLUMNS),
        # A byte a column, and a scale and a least value of 4 bytes each.
        ("int8", "fp16", COLUMNS + 8, 2 * COLUMNS),
    ],
)
def test_roofline_counts_what_codecs_make_of_vectors(forward, backward, result_bytes, gradient_bytes):
    codecs = QCommsConfig(forward, backward)
    found, plain = phases("table_wise", qcomms_config=codecs), phases("table_wise")
    for phase, row in (
        ("forward_communication", result_bytes),
        ("backward_communication", gradient_bytes),
    ):
        assert found[phase] == pytest.approx([4 * BAGS * row / 2 / ACROSS + LATENCY_ACROSS])
    assert found["forward_compute"] == pytest.approx(plain["forward_compute"])
    assert found["input_communication"] == pytest.approx(plain["input_communication"])


STATS = EmbeddingOffloadStats(0.3, 1000, [5, 3, 1], 100)


@attrs.frozen
class Drawn:
    table: TableSpec
    pooling_factors: tuple[float, ...]
    batch_size: int


def tables():
    return st.builds(
        lambda index, rows, columns, pooling, data_type, weighted, optimizer, cache: TableSpec(
            f"t{index}",
            rows,
            4 * columns,
            ["f", "g"],
            data_type,
            pooling,
            is_weighted=weighted,
            optimizer=OptimizerSpec(optimizer),
            cache=cache,
        ),
        st.just(0),
        st.integers(1, 10**9),
        st.integers(1, 300),
        st.sampled_from(["SUM", "MEAN", "NONE"]),
        st.sampled_from(["FP32", "FP16", "BF16"]),
        st.booleans(),
        st.sampled_from(["sgd", "adagrad", "row_wise_adagrad", "adam"]),
        st.sampled_from([CacheParams(), CacheParams(0.7), CacheParams(0.1, "lfu", STATS)]),
    )


def cases():
    pooling = st.tuples(*[st.floats(0, 300, allow_subnormal=False)] * 2)
    return st.builds(Drawn, tables(), pooling, st.integers(1, 100_000))
