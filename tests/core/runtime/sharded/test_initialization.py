"""Initial weights are the same however a table is cut, and different from table to table."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.runtime.plans import RowsMirrored

from shardwright import Block, ColumnRange, EmbeddingBagConfig, RowsModulo, RowsRange, RowsSplit
from shardwright.runtime.sharded.tables import initialization
from shardwright.runtime.sharded.tables.initialization import hashed, initialize

CHUNK_ELEMENTS = 1 << 20


def config_of(rows, dim, **options):
    return EmbeddingBagConfig(rows, dim, name="t", **options)


def block_weights(config, block, *, path="m.t", seed=5):
    weights = torch.full((block.num_rows, block.num_columns), torch.nan)
    initialize(weights, config, block, path=path, seed=seed)
    return weights


def whole(config, row_map=None, edges=(), **options):
    """The table put together from the blocks of a cut."""
    row_map = row_map or RowsRange(config.num_embeddings)
    table = torch.full((config.num_embeddings, config.embedding_dim), torch.nan)
    bounds = [0, *edges, config.embedding_dim]
    for part in row_map:
        for start, stop in pairwise(bounds):
            block = Block(part, ColumnRange(start, stop))
            rows = part.rows if isinstance(part.rows, slice) else torch.as_tensor(part.rows)
            table[rows, start:stop] = block_weights(config, block, **options)
    return table


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    kind=st.sampled_from([RowsRange, RowsModulo, RowsMirrored]),
    parts=st.integers(1, 6),
    edges=st.sets(st.integers(1, 5)).map(sorted),
)
def test_initialize_any_cut_gives_the_whole_table(rows, kind, parts, edges):
    config = config_of(rows, 6)
    assert torch.equal(whole(config, kind(rows, parts=parts), edges), whole(config))


def _arange(tensor):
    return tensor.copy_(torch.rand(tensor.shape).mul(1000).floor())


@pytest.mark.parametrize("init_fn", [None, torch.nn.init.normal_, _arange], ids=["uniform", "normal", "own"])
@pytest.mark.parametrize(
    "row_map",
    [
        lambda rows: RowsRange(rows, parts=3),
        lambda rows: RowsModulo(rows, parts=2),
        lambda rows: RowsMirrored(rows, 2),
        lambda rows: RowsSplit((0, 0, 7, rows, rows)),
    ],
    ids=["range", "modulo", "mirrored", "split"],
)
def test_initialize_table_of_several_runs_does_not_depend_on_the_cut(row_map, init_fn):
    dim = 4096
    rows = 2 * (CHUNK_ELEMENTS // dim) + 9  # three runs of rows, the last one short
    config = config_of(rows, dim, init_fn=init_fn)
    expected = whole(config)
    assert not expected.isnan().any()
    assert torch.equal(whole(config, row_map(rows), (100,)), expected)
    per_run = CHUNK_ELEMENTS // dim
    assert len(expected[:, :50].unique(dim=0)) == rows  # no row is another's
    assert not torch.equal(expected[:per_run], expected[per_run : 2 * per_run])  # runs have their own numbers


def test_initialize_init_fn_is_called_with_whole_rows_and_its_values_taken():
    shapes = []

    def init_fn(tensor):
        shapes.append(tuple(tensor.shape))
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))

    block = Block(RowsModulo(5, parts=2)[1], ColumnRange(1, 3))
    weights = block_weights(config_of(5, 3, init_fn=init_fn), block)
    assert shapes == [(5, 3)]
    assert weights.tolist() == [[4, 5], [10, 11]]


def test_initialize_uniform_stays_in_its_range_and_fills_it():
    table = whole(config_of(100, 20))
    assert -0.1 <= table.min() < -0.09
    assert 0.09 < table.max() <= 0.1
    given_range = whole(config_of(100, 20, weight_init_min=2, weight_init_max=3))
    assert 2 <= given_range.min() < given_range.max() <= 3
    assert given_range.unique().numel() > 1900


@pytest.mark.parametrize(("data_type", "dtype"), [("FP16", torch.float16), ("BF16", torch.bfloat16)])
def test_initialize_halves_are_the_nearest_halves(data_type, dtype):
    config = config_of(10, 4, data_type=data_type)
    block = Block(RowsRange(10)[0], ColumnRange(0, 4))
    weights = torch.zeros(10, 4, dtype=dtype)
    initialize(weights, config, block, path="t", seed=1)
    assert torch.equal(weights, block_weights(config, block, path="t", seed=1).to(dtype))
    assert weights.unique().numel() > 20


@pytest.mark.parametrize(
    "block",
    [
        Block(RowsRange(200_000)[0], ColumnRange(3, 5)),
        Block(RowsModulo(200_000, parts=50)[7], ColumnRange(0, 100)),
    ],
    ids=["columns", "modulo"],
)
def test_initialize_makes_the_values_of_its_block_and_no_others(block, monkeypatch):
    made = []
    hash_of = initialization.hashed
    monkeypatch.setattr(
        initialization,
        "hashed",
        lambda key, rows, columns: made.append(len(rows) * len(columns)) or hash_of(key, rows, columns),
    )
    weights = torch.zeros(block.num_rows, block.num_columns)
    tracemalloc.start()
    initialize(weights, config_of(200_000, 100), block, path="t", seed=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(made) == weights.numel()
    assert peak < 4 << 20  # the whole table has 80 MB


def test_initialize_uniform_values_are_spread_evenly_and_do_not_follow_from_their_neighbours():
    values = hashed(12345, np.arange(4000, dtype=np.uint64), np.arange(64, dtype=np.uint32)).astype(
        np.float64
    )
    assert abs(values.mean() - 0.5) < 0.002
    assert abs(values.var() - 1 / 12) < 0.001
    counts = np.bincount((values.reshape(-1) * 64).astype(int), minlength=64)
    assert counts.min() > 0.93 * values.size / 64
    centred = values - 0.5
    for neighbours in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1]):
        assert abs(neighbours.mean()) < 0.001  # a standard deviation is 1 / 12 / sqrt(256 000)
    others = hashed(12346, np.arange(4000, dtype=np.uint64), np.arange(64, dtype=np.uint32)) - 0.5
    assert abs((centred * others).mean()) < 0.001


def test_initialize_path_and_seed_tell_tables_apart_and_nothing_else_does():
    config = config_of(10, 4)
    torch.manual_seed(0)
    first = whole(config)
    torch.manual_seed(1)
    assert torch.equal(whole(config), first)
    assert not torch.equal(whole(config, path="m.u"), first)
    assert not torch.equal(whole(config, seed=6), first)


@pytest.mark.parametrize("init_fn", [None, torch.nn.init.normal_])
def test_initialize_leaves_torchs_random_numbers_as_they_were(init_fn):
    before = torch.get_rng_state()
    whole(config_of(10, 4, init_fn=init_fn))
    assert torch.equal(torch.get_rng_state(), before)


def test_initialize_by_a_function_takes_no_memory_for_the_numbers_of_rows_that_follow_one_another():
    block = Block(RowsRange(200_000)[0], ColumnRange(3, 5))
    weights = torch.zeros(block.num_rows, block.num_columns)
    tracemalloc.start()
    initialize(weights, config_of(200_000, 100, init_fn=_arange), block, path="t", seed=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20  # the numbers have 1.6 MB, and as much again in order
    assert weights.any(dim=1).all()
