"""Initial weights are the same however a table is cut, and on all ranks, and different from table to table."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import torch
from tests.core.runtime.plans import Cut, Cuts, RowsMirrored

from shardwright import (
    Block,
    ColumnRange,
    DistributedError,
    DistributedModelParallel,
    EmbeddingBagConfig,
    EmbeddingModuleShardingPlan,
    RowsModulo,
    RowsRange,
    RowsSplit,
    ShardingPlan,
)
from shardwright.runtime.sharded.tables import initialization
from shardwright.runtime.sharded.tables.initialization import hashed, initialize
from shardwright_plugins.dataflows import Replicate
from shardwright_testing import run_simulated

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


ROWS = Cut(150, 3, ("a",), row_map=RowsRange(150, parts=3), ranks=(0, 1, 2))
COLUMNS = Cut(40, 6, ("b",), edges=(2, 4), ranks=(0, 1, 2))
COPIES = Cut(40, 4, ("c",), ranks=(0, 1, 2), dataflow=Replicate())
CASE = Cuts([ROWS, COLUMNS, COPIES], 3)


def one_value(weight):
    weight[149 % len(weight), 0] += 1e-6


def order_of_rows(weight):
    weight.copy_(weight.flip(0))


def sign_of_zero(weight):
    weight[0] = -0.0


DIFFERENCES = [one_value, order_of_rows, sign_of_zero]


def modules(change, tables):
    """A module for each rank; rank 1's has other weights of some tables."""
    made = [CASE.module() for _ in range(CASE.world_size)]
    with torch.no_grad():
        for table in tables:
            for module in made:
                module.table_weight(table)[0] = 0.0
            change(made[1].table_weight(table))
    return made


def errors(work):
    def run(env):
        with pytest.raises(DistributedError) as error:
            work(env)
        return str(error.value)

    return run_simulated(run, CASE.world_size)


@pytest.mark.parametrize("change", DIFFERENCES)
@pytest.mark.parametrize("table", ["t0", "t1", "t2"])
def test_other_weights_on_one_rank_are_one_error_on_all(change, table):
    made = modules(change, [table])
    texts = errors(lambda env: CASE.shard(env, made[env.rank]))
    assert len(set(texts)) == 1
    assert f"table '{table}' is ranks 0, 2: checksum " in texts[0]
    assert "; rank 1: checksum " in texts[0]
    assert "(1 of 3 differ)" in texts[0]


def model_of(env, module, **options):
    plan = ShardingPlan({"": EmbeddingModuleShardingPlan(CASE.shardings())})
    return DistributedModelParallel(
        module, env=env, device="cpu", plan=plan, sharders=[CASE.sharder], **options
    )


@pytest.mark.parametrize("change", DIFFERENCES)
def test_sync_module_states_takes_the_first_ranks_weights(change):
    made = modules(change, ["t0", "t2"])
    expected = {name: weight.clone() for name, weight in made[0].state_dict().items()}
    for state in run_simulated(
        lambda env: model_of(env, made[env.rank], sync_module_states=True).full_state_dict(), CASE.world_size
    ):
        assert {name: weight.numpy().tobytes() for name, weight in state.items()} == {
            name: weight.numpy().tobytes() for name, weight in expected.items()
        }


@pytest.mark.parametrize("sync", [False, True])
def test_meta_on_one_rank_alone_is_one_error_on_all(sync):
    made = [CASE.module(), CASE.module("meta"), CASE.module()]
    texts = errors(lambda env: model_of(env, made[env.rank], sync_module_states=sync))
    assert len(set(texts)) == 1
    assert "; rank 1: on 'meta'" in texts[0]


def test_weights_that_are_a_part_of_a_larger_tensor_are_compared():
    made = [CASE.module() for _ in range(3)]
    for rank, module in enumerate(made):
        weight = module.table_weight("t1")
        whole = torch.full((weight.numel() + 2 * rank + 1,), float(rank))
        whole[rank:-1][: weight.numel()] = weight.detach().flatten()
        weight.data = whole[rank : rank + weight.numel()].view(weight.shape)
    expected = made[0].state_dict()
    for state in run_simulated(lambda env: CASE.shard(env, made[env.rank]).full_state_dict(), 3):
        torch.testing.assert_close(dict(state), dict(expected), rtol=0, atol=0)
