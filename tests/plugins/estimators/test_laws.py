"""What holds for every estimator: finite, not negative, columns as one by one, and no less time or memory for more."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.plugins.built_in import built_in

from shardwright.host import host
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.enumeration import enumerate_options
from shardwright.planning.tables.caching import CacheParams, EmbeddingOffloadStats
from shardwright.planning.tables.constraints import Constraints, ParameterConstraints
from shardwright.planning.tables.optimizers import OptimizerSpec
from shardwright.planning.tables.spec import TableSpec

ESTIMATORS = built_in("estimators")
LAWS = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TOPOLOGIES = [
    Topology(1, "cpu"),
    Topology(3, "cpu", local_world_size=1),
    Topology(4, "cuda"),
    Topology(16, "cuda", local_world_size=4),
]
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


def options_of(drawn, topology):
    specs = [attrs.evolve(one.table, name=f"t{index}") for index, one in enumerate(drawn)]
    rules = {
        spec.name: ParameterConstraints(
            pooling_factors=one.pooling_factors,
            batch_sizes=[one.batch_size],
            min_partition=4 * (spec.embedding_dim // 8) or 4,
        )
        for spec, one in zip(specs, drawn, strict=True)
    }
    return enumerate_options(specs, topology, Constraints(rules), host(), batch_size=1, fold_tables=False)


def totals(name, options, topology):
    """Of each run, all phases or all tiers together; and every single column."""
    columns = host().estimators.create(name).estimate(options, topology)
    return sum(columns.values()), columns


def of_options(name, options, topology):
    """Of all shards of each option together."""
    total, _ = totals(name, options, topology)
    return np.add.reduceat(total * options.count, options.first_shard[:-1])


def shapes(options):
    """What tells options of one table apart, but for sizes."""
    return [
        (options.type_of(o).name, options.kernel_of(o).name, int(options.shards_per_option[o]))
        for o in range(options.num_options)
    ]


@pytest.mark.parametrize("name", ESTIMATORS)
@given(drawn=st.lists(cases(), min_size=1, max_size=4), topology=st.sampled_from(TOPOLOGIES))
@LAWS
def test_estimates_are_finite_not_negative_and_one_a_run(name, drawn, topology):
    options = options_of(drawn, topology)
    for column in totals(name, options, topology)[1].values():
        assert column.shape == (options.num_shards,)
        assert np.isfinite(column).all()
        assert (column >= 0).all()


@pytest.mark.parametrize("name", ESTIMATORS)
@given(drawn=st.lists(cases(), min_size=2, max_size=4), topology=st.sampled_from(TOPOLOGIES))
@LAWS
def test_estimates_of_columns_are_those_of_tables_one_by_one(name, drawn, topology):
    together = totals(name, options_of(drawn, topology), topology)[1]
    alone = [totals(name, options_of([one], topology), topology)[1] for one in drawn]
    latency = (
        1e3 * len(drawn) * max(topology.link_latencies_ms.values()) if name in ("engine", "roofline") else 0.0
    )
    for what, column in together.items():
        joined = np.concatenate([columns[what] for columns in alone])
        # Tables share the latency of collectives, which is the only thing they have to do with each other.
        np.testing.assert_allclose(column, joined, rtol=1e-12, atol=latency)


@pytest.mark.parametrize("grown", ["rows", "ids", "batch"])
@pytest.mark.parametrize("name", ESTIMATORS)
@given(drawn=cases(), topology=st.sampled_from(TOPOLOGIES), factor=st.integers(2, 50))
@LAWS
def test_estimates_never_fall_with_more_rows_ids_or_samples(name, grown, drawn, topology, factor):
    more = {
        "rows": lambda: attrs.evolve(
            drawn, table=attrs.evolve(drawn.table, num_embeddings=drawn.table.num_embeddings * factor)
        ),
        "ids": lambda: attrs.evolve(
            drawn, pooling_factors=tuple(factor * pooling for pooling in drawn.pooling_factors)
        ),
        "batch": lambda: attrs.evolve(drawn, batch_size=drawn.batch_size * factor),
    }[grown]()
    small, large = (options_of([one], topology) for one in (drawn, more))
    assume(shapes(small) == shapes(large))
    before, after = (of_options(name, options, topology) for options in (small, large))
    assert (after >= before * (1 - 1e-9)).all()
