"""Codecs in a step: with such that lose nothing, all is bit for bit as without, on every way home and back."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from attrs import evolve
from hypothesis import strategies as st
from tests.core.runtime.exact_codecs import ExactCodecs
from tests.core.runtime.plans import SHARDER, Cut, Cuts, Kernels, cuts, train_step
from tests.drawn import drawn
from tests.errors import raises
from tests.pairs import pairwise

from shardwright import (
    EmbeddingBagCollectionSharder,
    Exchange,
    QCommsConfig,
    RowsRange,
    UnknownPluginError,
    UnsupportedError,
)
from shardwright.host import PluginHost, use_host
from shardwright.runtime.routed.wire import WireSegment
from shardwright_plugins.dataflows import Hierarchical
from shardwright_testing import run_simulated

NAMES = [None, "doubles", "mirrored", "as_it_is"]
CONFIGS = st.builds(QCommsConfig, st.sampled_from(NAMES), st.sampled_from(NAMES))
HALVES = RowsRange(8, parts=2)


def host_with_codecs():
    return PluginHost(entry_points=(), plugins={"loops": Kernels(), "codecs": ExactCodecs()}, environment={})


@pytest.fixture(autouse=True)
def only_exact_codecs():
    with use_host(host_with_codecs()) as replaced:
        yield replaced


def train(case, batch_sizes, *, local_world_size=None, sharder=None):
    """Two steps; for each rank outputs, weights, and every exchange with the bytes it sent."""
    module = case.module()

    def work(env):
        sharded = (sharder or case.sharder).shard(module, case.shardings(), env, "cpu")
        before = len(env.communicator.sent_bytes)
        outputs = [
            train_step(
                case, sharded, case.batch(batch_sizes[env.rank], seed=10 * step + env.rank), step, env.rank
            )
            for step in range(2)
        ]
        sent = env.communicator.sent_bytes[before:]
        return outputs, sent, sharded.full_state_dict()

    return run_simulated(work, case.world_size, local_world_size=local_world_size)


def with_codecs(case, *configs):
    """The case, its tables with these codecs in turn."""
    tables = [evolve(table, codecs=configs[i % len(configs)]) for i, table in enumerate(case.tables)]
    return evolve(case, tables=tables)


def assert_bitwise_equal(plain, coded):
    for (outputs, sent, state), (others, other_sent, other_state) in zip(plain, coded, strict=True):
        assert [label for label, _ in other_sent] == [label for label, _ in sent]
        assert all(torch.equal(a, b) for a, b in zip(outputs, others, strict=True))
        assert all(torch.equal(weight, other_state[name]) for name, weight in state.items())


@drawn(
    cuts(is_pooled=None),
    st.lists(CONFIGS, min_size=3, max_size=3),
    st.lists(st.integers(0, 3), min_size=3),
    quick=20,
    thorough=150,
)
def test_any_cuts_with_codecs_mixed_are_as_without(case, configs, batch_sizes):
    with use_host(host_with_codecs()):
        assert_bitwise_equal(train(case, batch_sizes), train(with_codecs(case, *configs), batch_sizes))


INSIDE_HOSTS = (
    Cut(8, 4, ("a",), "SUM", HALVES, (), (0, 1), dataflow=Hierarchical()),
    Cut(8, 6, ("b", "a"), "MEAN", HALVES, (), (2, 3), "loop_by_sample", Hierarchical()),
    Cut(8, 6, ("a", "b"), "SUM", HALVES, (4,), (0, 2, 1, 3), dataflow=Hierarchical()),
    Cut(7, 3, ("b",), "SUM", ranks=(3,), dataflow=Exchange()),
)


@pytest.mark.parametrize(("host_size", "forward", "backward"), pairwise(product([1, 2, 4], NAMES, NAMES)))
def test_sums_inside_hosts_with_codecs_are_as_without(host_size, forward, backward):
    case, sizes = Cuts(INSIDE_HOSTS, 4), (3, 1, 0, 4)
    config, other = QCommsConfig(forward, backward), QCommsConfig(backward, None)
    plain = train(case, sizes, local_world_size=host_size)
    coded = train(with_codecs(case, config, config, other), sizes, local_world_size=host_size)
    assert_bitwise_equal(plain, coded)


def bytes_of(results, label):
    return sum(sum(sizes) for _, sent, _ in results for name, sizes in sent if name == label)


def test_bytes_of_sums_inside_the_host_are_coded_on_both_legs():
    table = Cut(8, 4, ("a",), "SUM", HALVES, (), (0, 1), dataflow=Hierarchical())
    case = with_codecs(Cuts([table], 4), QCommsConfig("mirrored", "doubles"))
    results = train(case, (8, 8, 8, 8), local_world_size=2)
    steps, bags, parts = 2, 32, 2
    assert bytes_of(results, "results inside the host") == steps * bags * parts * 17
    assert bytes_of(results, "results across hosts") == steps * bags * 17
    assert bytes_of(results, "gradients across hosts") == steps * bags * 32
    assert bytes_of(results, "gradients inside the host") == steps * bags * parts * 32


def test_sharder_codecs_are_for_all_tables_whose_plan_says_nothing():
    sharder = EmbeddingBagCollectionSharder(SHARDER.fused_params, QCommsConfig("float64", "doubles"))
    case = Cuts([Cut(9, 8, ("a",), ranks=(0,)), Cut(7, 8, ("b",), ranks=(1,))], 2)
    both = train(case, (8, 8), sharder=sharder)
    assert bytes_of(both, "results") == bytes_of(both, "gradients") == 2 * 16 * (64 + 64)
    one = train(with_codecs(case, QCommsConfig(forward_precision="as_it_is"), None), (8, 8), sharder=sharder)
    assert bytes_of(one, "results") == 2 * 16 * (32 + 64)
    assert bytes_of(one, "gradients") == 2 * 16 * (64 + 64)


def test_codec_that_carries_no_partial_sums_is_refused_where_rows_are_cut():
    table = Cut(8, 4, ("a",), "SUM", HALVES, (), (0, 1))
    whole = QCommsConfig("whole_only", "whole_only")
    case = with_codecs(Cuts([table], 2), whole)
    with raises(UnsupportedError, subject="t0", asked="qcomms_config"):
        train(case, (2, 2))
    allowed = [
        Cuts([evolve(table, row_map=None)], 2),
        Cuts([evolve(table, pooling="NONE")], 2),
    ]
    for plain in allowed:
        assert_bitwise_equal(train(plain, (2, 2)), train(with_codecs(plain, whole), (2, 2)))
    backward = with_codecs(Cuts([table], 2), QCommsConfig(backward_precision="whole_only"))
    assert_bitwise_equal(train(Cuts([table], 2), (2, 2)), train(backward, (2, 2)))


def test_unknown_codec_of_a_plan_is_told_with_its_table():
    case = with_codecs(Cuts([Cut(9, 8, ("a",))], 1), QCommsConfig("mirored"))
    told = r"the codecs of table 't0' \(9 x 8 FP32\): no codec 'mirored'.*Did you mean 'mirrored'"
    with pytest.raises(UnknownPluginError, match=told):
        train(case, (2,))


def test_a_column_of_a_wider_gradient_travels_as_itself():
    column = torch.arange(6.0).view(3, 2)[:, 1:]
    segment = WireSegment(None, 1)
    assert segment.decoded(segment.encoded(column).view(-1)).tolist() == [1.0, 3.0, 5.0]
