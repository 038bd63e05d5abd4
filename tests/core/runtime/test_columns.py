"""Columns beside ids reach the kernels that ask for them; simulated ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from tests.core.runtime.mixed_cuts import MIXED, simulate
from tests.core.runtime.plans import (
    EXAMPLES,
    RATE,
    Cut,
    Cuts,
    Loop,
    LoopLookup,
    cuts,
    gradient_like,
    host_with_loops,
    output_of,
)

from shardwright import (
    Block,
    InvalidInputError,
    KeyedJaggedTensor,
    Layout,
    OptimizerSpec,
    ParameterConstraints,
    RowsRange,
    ShardingType,
    TableSpec,
    Topology,
    UnsupportedError,
    hookimpl,
)
from shardwright.host import PluginHost, use_host
from shardwright.planning.options.enumeration import enumerate_options
from shardwright.planning.options.search_space import traffic_bytes
from shardwright.planning.tables.constraints import Constraints
from shardwright.runtime.step.batches.inputs import InputChecks
from shardwright_plugins.dataflows import Replicate
from shardwright_testing import run_simulated


class TimedLookup(LoopLookup):
    """Multiplies rows by the column `time`, which must belong to the column `count`."""

    def forward(self, bags, *, training):
        assert bags.columns["count"].tolist() == (bags.columns["time"] * 2**24).long().tolist()
        return super().forward(evolve(bags, weights=bags.columns["time"]), training=training)


class Timed(Loop):
    name, aliases = "timed", ()

    def columns(self, request):
        return {"time": "float32", "count": "int64"}

    def build(self, blocks, *, device):
        return TimedLookup(blocks, batch_major=self.batch_major)


class Wrong(Loop):
    name, aliases = "wrong", ()

    def columns(self, request):
        return {"time": "int64"}


class OfValues(Loop):
    name, aliases = "of_values", ()

    def columns(self, request):
        return {"values": "int64"}


class Halves(ShardingType):
    name, abbreviation, offered = "halves", "HV", "always"

    def layouts(self, table, topology, constraints):
        rows = RowsRange(table.num_embeddings, parts=2)
        yield Layout([Block(part, table.all_columns, rank) for rank, part in enumerate(rows)])


class Columns:
    @hookimpl
    def shardwright_compute_kernels(self):
        return [Timed, Wrong, OfValues]

    @hookimpl
    def shardwright_sharding_types(self):
        return [Halves]


@pytest.fixture(autouse=True)
def with_timed() -> Iterator[PluginHost]:
    with use_host(host_with_loops(timed=Columns())) as host:
        yield host


def timed(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The batch with its weights as a column of another name."""
    weights = batch.weights()
    columns = {"time": weights, "count": (weights * 2**24).long(), "unread": torch.zeros_like(weights)}
    return KeyedJaggedTensor(batch.keys(), batch.values(), lengths=batch.lengths(), columns=columns)


@EXAMPLES
@given(cuts(2), st.integers(0, 3))
def test_kernel_that_weighs_by_a_column_trains_as_a_weighted_module_does(case, seed):
    weighted = evolve(case, is_weighted=True)
    own = evolve(case, is_weighted=False, tables=[evolve(table, kernel="timed") for table in weighted.tables])
    batches = [weighted.batch(2 + rank, seed=seed + rank) for rank in range(2)]

    def work(env):
        sharded = own.shard(env, own.module())
        output = output_of(own, sharded(timed(batches[env.rank])))
        output.backward(gradient_like(output, env.rank))
        return output.detach(), sharded.full_state_dict()

    with use_host(host_with_loops(timed=Columns())):
        results = run_simulated(work, 2)
    module = weighted.module()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    for rank, batch in enumerate(batches):
        output = output_of(weighted, module(batch))
        torch.testing.assert_close(results[rank][0], output.detach())
        ((output * gradient_like(output, rank)).sum() / 2).backward()
    optimizer.step()
    for name, weight in module.state_dict().items():
        torch.testing.assert_close(results[0][1][name], weight)


TABLES = [
    Cut(9, 4, ("a",), row_map=RowsRange(9, parts=2), ranks=(0, 1), kernel="timed"),
    Cut(5, 2, ("b",), ranks=(1,)),
]


def without(name):
    return lambda columns: {other: column for other, column in columns.items() if other != name}


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (
            without("time"),
            "a compute kernel asks for the column 'time' but the KeyedJaggedTensor has no time",
        ),
        (
            without("count"),
            "a compute kernel asks for the column 'count' but the KeyedJaggedTensor has no count",
        ),
        (
            lambda columns: {**columns, "count": columns["count"].float()},
            "a compute kernel asks for the column 'count' of torch.int64, and the KeyedJaggedTensor has it of "
            "torch.float32",
        ),
    ],
)
def test_column_that_one_rank_lacks_is_the_same_error_on_all(spoil, text):
    case = Cuts(TABLES, 2)

    def work(sharded, batch, env):
        columns = {"time": torch.zeros(len(batch.values())), "count": torch.zeros_like(batch.values())}
        good, bad = (
            KeyedJaggedTensor(batch.keys(), batch.values(), lengths=batch.lengths(), columns=own)
            for own in (columns, spoil(columns))
        )
        with pytest.raises(InvalidInputError) as error:
            sharded(bad if env.rank else good)
        sharded(good)  # the next step works
        return str(error.value)

    expected = f"rank 1: feature 'a' of table 't0' (9 x 4 FP32): {text}"
    assert simulate(case, work) == [expected, expected]


def test_rank_without_ids_may_have_columns_of_another_dtype():
    """`torch.tensor([])` is float32, and no numbers are those of either dtype."""
    case = Cuts(TABLES, 2)

    def work(sharded, batch, env):
        ids = batch.values()[:0] if env.rank else batch.values()
        dtypes = (torch.int64, torch.float32) if env.rank else (torch.float32, torch.int64)
        columns = {
            name: torch.zeros(len(ids), dtype=dtype)
            for name, dtype in zip(("time", "count"), dtypes, strict=True)
        }
        lengths = torch.zeros_like(batch.lengths()) if env.rank else batch.lengths()
        output = sharded(KeyedJaggedTensor(batch.keys(), ids, lengths=lengths, columns=columns))
        return output.values().shape[0]

    assert all(simulate(case, work))


def test_strict_checks_refuse_columns_that_nothing_reads_and_numbers_that_are_not_finite():
    case = Cuts(TABLES, 1)
    case = evolve(case, tables=[evolve(table, ranks=(0,)) for table in TABLES])
    weighted = evolve(case, is_weighted=True).batch(3)
    batch = timed(weighted)
    weights = torch.full_like(weighted.weights(), torch.inf)

    def work(sharded, _, env):
        sharded.engine.reader.checks = InputChecks.STRICT
        with pytest.raises(InvalidInputError, match="has unread, which strict checks refuse"):
            sharded(batch)
        columns = {"time": weights, "count": torch.zeros_like(batch.values())}
        with pytest.raises(InvalidInputError, match=r"feature 'a' of .* has the time inf at position 0"):
            sharded(KeyedJaggedTensor(batch.keys(), batch.values(), lengths=batch.lengths(), columns=columns))

    simulate(case, work)


@pytest.mark.parametrize(
    ("kernels", "text"),
    [
        (("timed", "wrong"), "table 't1' .* kernel 'wrong' asks for the column 'time' of int64"),
        (
            ("timed", "of_values"),
            "table 't1' .* asks for the column 'values' of int64.* nor one of '', 'values', 'lengths'",
        ),
        (("loop", "timed"), "every rank has a copy of"),
    ],
)
def test_kernels_that_ask_for_what_cannot_come_are_refused(kernels, text):
    first, second = kernels
    dataflow = Replicate() if first == "loop" else MIXED[0].dataflow
    ranks = (0, 1) if first == "loop" else (0,)
    tables = [
        Cut(4, 2, ("a",), kernel=first),
        Cut(4, 2, ("b",), kernel=second, dataflow=dataflow, ranks=ranks),
    ]
    case = Cuts(tables, 2)

    def work(env):
        with pytest.raises(UnsupportedError, match=text):
            case.shard(env, case.module())

    run_simulated(work, 2)


def test_bytes_of_columns_that_the_planner_counts_are_those_that_ranks_send(with_timed):
    table, topology = TableSpec("t0", 8, 4, ["a"], optimizer=OptimizerSpec("sgd")), Topology(2, "cpu")
    ids = torch.arange(8)
    columns = {"time": torch.zeros(8), "count": torch.zeros_like(ids)}
    batch = KeyedJaggedTensor(["a"], ids, lengths=torch.full((4,), 2, dtype=torch.int32), columns=columns)

    def sent_by(kernel):
        case = Cuts([Cut(8, 4, ("a",), row_map=RowsRange(8, parts=2), ranks=(0, 1), kernel=kernel)], 2)

        def work(env):
            sharded = case.shard(env, case.module())
            first = len(env.communicator.sent_bytes)
            sharded(batch).values()
            told = env.communicator.sent_bytes[first:]
            return sum(sum(by_rank) for label, by_rank in told if label.split()[0] == "ids")

        return sum(run_simulated(work, 2))

    def counted_by(kernel):
        rule = ParameterConstraints(compute_kernels=[kernel], pooling_factors=[2])
        rules = Constraints({"t0": rule})
        options = enumerate_options([table], topology, rules, with_timed, batch_size=4)
        return float(traffic_bytes(options, topology)[0] @ options.count)

    more = sent_by("timed") - sent_by("loop")
    assert more == counted_by("timed") - counted_by("loop") == 2 * 8 * (4 + 8)
