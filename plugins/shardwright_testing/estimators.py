"""Conformance tests of estimators.

Legend: S runs of equal shards, O options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwright.contracts import Estimator
from shardwright.contracts.estimator import PERFORMANCE, STORAGE
from shardwright.host.plugin_host import host
from shardwright.planning.arrays import Floats
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.enumeration import enumerate_options
from shardwright.planning.options.options import Options
from shardwright.planning.tables.constraints import Constraints, ParameterConstraints
from shardwright.planning.tables.optimizers import OptimizerSpec
from shardwright.planning.tables.spec import TableSpec
from shardwright_testing.equality.random_cases import LAWS, run_drawn
from shardwright_testing.kernels.loops import OPTIMIZERS

_ROUNDING = 1e-9
_COSTS = settings(LAWS, max_examples=15)


@attrs.frozen
class Drawn:
    """A table and what is looked up in it."""

    table: TableSpec
    pooling_factor: float
    batch_size: int

    def times(self, what: str, factor: int) -> Drawn:
        """Multiply the rows, columns, ids or samples by ``factor``."""
        if what == "ids":
            return attrs.evolve(self, pooling_factor=self.pooling_factor * factor)
        if what == "samples":
            return attrs.evolve(self, batch_size=self.batch_size * factor)
        field = {"rows": "num_embeddings", "columns": "embedding_dim"}[what]
        return attrs.evolve(
            self, table=attrs.evolve(self.table, **{field: getattr(self.table, field) * factor})
        )


def _drawn(*, columns: int) -> st.SearchStrategy[Drawn]:
    tables = st.builds(
        TableSpec,
        st.just("t"),
        st.integers(1, 10**8),
        st.integers(1, 8).map(lambda count: count * columns),
        st.just(("f", "g")),
        st.sampled_from(["FP32", "FP16"]),
        st.sampled_from(["SUM", "MEAN", "NONE"]),
        is_weighted=st.booleans(),
        optimizer=st.sampled_from(OPTIMIZERS).map(OptimizerSpec),
    )
    return st.builds(Drawn, tables, st.floats(0, 200, allow_subnormal=False), st.integers(1, 50_000))


def _topologies() -> list[Topology]:
    """Without latencies, which the tables of a model share, so that they have to do with each other."""
    shapes: list[tuple[int, str, int | None]] = [(1, "cpu", None), (3, "cpu", 1), (8, "cuda", 4)]
    links = Topology(1, "cpu").link_latencies_ms
    return [
        Topology(ranks, device, local_world_size=local, link_latencies_ms=dict.fromkeys(links, 0.0))
        for ranks, device, local in shapes
    ]


class EstimatorTests:
    """The tests of an estimator: give the fixture ``estimator``, an instance.

    The options of drawn tables are those of all sharding types and kernels that are installed, or, of them, those that
    the estimator's ``space`` offers.
    """

    def test_measures_time_or_memory(self, estimator: Estimator) -> None:
        """And of the tiers that there are, if it is memory."""
        assert estimator.measures in (PERFORMANCE, STORAGE), (
            f"{estimator.name}: measures must be {PERFORMANCE!r} or {STORAGE!r}, it is {estimator.measures!r}"
        )
        for topology in _topologies():
            columns = estimator.estimate(_options(estimator, [_PLAIN], topology), topology)
            assert columns, f"{estimator.name}: estimates nothing"
            if estimator.measures == STORAGE:
                for tier in columns:
                    topology.tier_of(tier)  # raises with the tiers there are

    def test_estimates_are_finite_and_not_negative(self, estimator: Estimator) -> None:
        """One value of each run of shards."""

        @_COSTS
        @given(st.lists(_drawn(columns=4), min_size=1, max_size=3), st.sampled_from(_topologies()))
        def check(drawn: Sequence[Drawn], topology: Topology) -> None:
            options = _options(estimator, drawn, topology)
            for what, column in estimator.estimate(options, topology).items():
                values = np.asarray(column)
                assert values.shape == (options.num_shards,), (
                    f"{estimator.name}: {what} has shape {values.shape}, there are {options.num_shards} runs of shards"
                )
                wrong = np.flatnonzero(~np.isfinite(values) | (values < 0))
                if len(wrong):
                    raise AssertionError(
                        f"{estimator.name}: {what} of {_describe(options, int(wrong[0]))} is {values[wrong[0]]}; it "
                        "must be finite and not negative"
                    )

        check()

    def test_estimates_of_columns_are_those_of_tables_one_by_one(self, estimator: Estimator) -> None:
        """A shard costs the same, whichever others are asked for with it."""

        @_COSTS
        @given(st.lists(_drawn(columns=4), min_size=2, max_size=3), st.sampled_from(_topologies()))
        def check(drawn: Sequence[Drawn], topology: Topology) -> None:
            options = _options(estimator, drawn, topology)
            together = estimator.estimate(options, topology)
            alone = [estimator.estimate(_options(estimator, [one], topology), topology) for one in drawn]
            for what, column in together.items():
                joined = np.concatenate([columns[what] for columns in alone])
                wrong = np.flatnonzero(~np.isclose(column, joined, rtol=_ROUNDING, atol=0))
                if len(wrong):
                    raise AssertionError(
                        f"{estimator.name}: {what} of {_describe(options, int(wrong[0]))} is {column[wrong[0]]} with "
                        f"other tables and {joined[wrong[0]]} on its own"
                    )

        check()

    def test_estimates_are_the_same_each_time(self, estimator: Estimator) -> None:
        """And the options are left unchanged."""

        @_COSTS
        @given(st.lists(_drawn(columns=4), min_size=1, max_size=3), st.sampled_from(_topologies()))
        def check(drawn: Sequence[Drawn], topology: Topology) -> None:
            options = _options(estimator, drawn, topology)
            before = {what: column.copy() for what, column in _arrays(options).items()}
            first, again = (dict(estimator.estimate(options, topology)) for _ in range(2))
            for what, column in first.items():
                assert np.array_equal(column, again[what]), (
                    f"{estimator.name}: {what} is another when it is asked again; an estimator holds no state"
                )
            for what, column in _arrays(options).items():
                assert np.array_equal(column, before[what]), f"{estimator.name}: changes the options' {what}"

        run_drawn(check)

    @pytest.mark.parametrize("what", ["rows", "columns", "ids", "samples"])
    def test_estimates_never_fall_with_more_bytes(self, estimator: Estimator, what: str) -> None:
        """Estimates are those of all shards of an option together; columns are grown from wide ones."""

        @_COSTS
        @given(
            _drawn(columns=1024 if what == "columns" else 4),
            st.integers(2, 20),
            st.sampled_from(_topologies()),
        )
        def check(drawn: Drawn, factor: int, topology: Topology) -> None:
            small, large = (
                _options(estimator, [one], topology) for one in (drawn, drawn.times(what, factor))
            )
            assume(_shapes(small) == _shapes(large))
            before, after = (_of_options(estimator, options, topology) for options in (small, large))
            wrong = np.flatnonzero(after < before * (1 - _ROUNDING))
            if len(wrong):
                option = int(wrong[0])
                raise AssertionError(
                    f"{estimator.name}: with {factor} times as many {what}, {_shapes(small)[option]} of "
                    f"{small.tables[0].describe()} falls from {before[option]} to {after[option]}"
                )

        check()


_PLAIN = Drawn(TableSpec("t", 1000, 64, ["f", "g"]), 10.0, 100)


def _options(estimator: Estimator, drawn: Sequence[Drawn], topology: Topology) -> Options:
    specs = [attrs.evolve(one.table, name=f"t{index}") for index, one in enumerate(drawn)]
    rules = {
        spec.name: ParameterConstraints(
            pooling_factors=[one.pooling_factor, one.pooling_factor / 2],
            batch_sizes=[one.batch_size],
            min_partition=max(4, spec.embedding_dim // 4),
        )
        for spec, one in zip(specs, drawn, strict=True)
    }
    space = estimator.option_space(topology)
    return enumerate_options(
        specs, topology, Constraints(rules), host(), batch_size=1, fold_tables=False, space=space
    )


def _arrays(options: Options) -> Mapping[str, Any]:
    fields = ((field.name, getattr(options, field.name)) for field in attrs.fields(Options))
    return {name: value for name, value in fields if isinstance(value, np.ndarray)}


def _of_options(estimator: Estimator, options: Options, topology: Topology) -> Floats:
    total = np.zeros(options.num_shards)
    for column in estimator.estimate(options, topology).values():
        total += np.asarray(column)
    sums: Floats = np.add.reduceat(total * options.count, options.first_shard[:-1])
    return sums


def _shapes(options: Options) -> list[str]:
    """Name what tells options of one table apart, but for sizes."""
    return [
        f"{options.type_of(o).name} with {options.kernel_of(o).name} in {options.shards_per_option[o]} shards"
        for o in range(options.num_options)
    ]


def _describe(options: Options, run: int) -> str:
    option = int(options.option[run])
    table = options.tables[int(options.table[option])]
    return (
        f"a shard of {int(options.num_rows[run])} x {int(options.num_columns[run])} of {table.describe()} "
        f"({options.type_of(option).name}, {options.kernel_of(option).name})"
    )
