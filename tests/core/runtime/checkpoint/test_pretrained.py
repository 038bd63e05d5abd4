"""Weights that are streamed in, and unsharded modules that come out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.core.runtime.checkpoint.test_save_and_load import BY_INDEX, IN_RUNS, ROWS
from tests.core.runtime.checkpoint.test_sharded_state_dict import OTHERS
from tests.core.runtime.mixed_cuts import case_of
from tests.core.runtime.plans import SHARDER

import shardwright as sw
from shardwright.errors import InvalidInputError, UnknownNameError, UnsupportedError
from shardwright.runtime.checkpoint import pretrained
from shardwright_testing.simulated import run_simulated

ONE_RANK = OTHERS[0]
WEIGHTS = np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 4)


def npy(folder):
    np.save(folder / "w.npy", WEIGHTS)
    return folder / "w.npy"


def parquet(folder, *, as_lists):
    pa = pytest.importorskip("pyarrow")
    written = pytest.importorskip("pyarrow.parquet")

    columns = {"w": list(WEIGHTS)} if as_lists else {f"c{i}": WEIGHTS[:, i] for i in range(4)}
    written.write_table(pa.table(columns), folder / "w.parquet", row_group_size=400)
    return str(folder / "w.parquet")


def safetensors(folder):
    torch_files = pytest.importorskip("safetensors.torch")
    torch_files.save_file({"w": torch.from_numpy(WEIGHTS)}, folder / "w.safetensors")
    return folder / "w.safetensors"


SOURCES = {
    "tensor": lambda folder: torch.from_numpy(WEIGHTS),
    "array of doubles": lambda folder: WEIGHTS.astype(np.float64),
    "npy": npy,
    "parquet": lambda folder: parquet(folder, as_lists=False),
    "parquet of lists": lambda folder: parquet(folder, as_lists=True),
    "safetensors": safetensors,
    "blocks": lambda folder: np.array_split(WEIGHTS, 7),
}


@pytest.mark.parametrize("case", [BY_INDEX, IN_RUNS], ids=["modulo and columns", "columns"])
@pytest.mark.parametrize("source", SOURCES)
def test_weights_stream_into_any_plan(source, case, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "AT_ONCE_BYTES", 4000)
    given, module = SOURCES[source](tmp_path), case.module()
    before = module.state_dict()["embedding_bags.t1.weight"]

    def work(env):
        sharded = case.shard(env, module)
        sw.load_pretrained(sharded, "t0", given)
        return sharded.state_dict()

    for state in run_simulated(work, case.world_size):
        assert torch.equal(state["embedding_bags.t0.weight"], torch.from_numpy(WEIGHTS))
        assert torch.equal(state["embedding_bags.t1.weight"], before)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (WEIGHTS[:-1], rf"have the shape \[{ROWS - 1}, 4\]; the table's is \[{ROWS}, 4\]"),
        ([WEIGHTS[:5, :3]], rf"the rows from 0 on have the shape \[5, 3\], of \[{ROWS}, 4\]"),
        ([WEIGHTS, WEIGHTS], rf"the rows from {ROWS} on"),
        ([WEIGHTS[:5]], "the blocks of rows end at row 5"),
    ],
    ids=["rows", "columns", "too many", "too few"],
)
def test_weights_of_another_shape_are_refused(source, text):
    def work(env):
        with pytest.raises(InvalidInputError, match=text):
            sw.load_pretrained(IN_RUNS.shard(env, IN_RUNS.module()), "t0", source)

    run_simulated(work, IN_RUNS.world_size)


def test_complex_weights_are_refused():
    def work(env):
        with pytest.raises(InvalidInputError, match=r"weights are complex \(torch\.complex64\).*real part"):
            sw.load_pretrained(IN_RUNS.shard(env, IN_RUNS.module()), "t0", WEIGHTS.astype(np.complex64))

    run_simulated(work, IN_RUNS.world_size)


def test_unknown_table_and_file_are_refused(tmp_path):
    def work(env):
        sharded = IN_RUNS.shard(env, IN_RUNS.module())
        with pytest.raises(UnknownNameError, match=r"no sharded table 't2'; it has 't0', 't1'\."):
            sw.load_pretrained(sharded, "t2", WEIGHTS)
        with pytest.raises(UnsupportedError, match=r"are read from \.npy, \.safetensors and \.parquet"):
            sw.load_pretrained(sharded, "t0", tmp_path / "w.csv")

    run_simulated(work, IN_RUNS.world_size)


def test_npy_of_pickled_objects_is_not_unpickled(tmp_path):
    np.save(tmp_path / "w.npy", np.array([object()]), allow_pickle=True)

    def work(env):
        with pytest.raises(InvalidInputError, match="Python objects"):
            sw.load_pretrained(IN_RUNS.shard(env, IN_RUNS.module()), "t0", tmp_path / "w.npy")

    run_simulated(work, IN_RUNS.world_size)


def test_unshard_gives_the_module_that_was_sharded():
    case = case_of()

    def work(env):
        sharded = case.shard(env, case.module())
        return sharded.unshard()

    batch = case.batch(3)
    for module in run_simulated(work, case.world_size):
        assert type(module) is sw.EmbeddingBagCollection
        assert torch.equal(module(batch).values(), case.module()(batch).values())


def test_unshard_a_model_leaves_the_sharded_one_as_it_is():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bags, self.over = ONE_RANK.module(), torch.nn.Linear(19, 1)

        def forward(self, batch):
            return self.over(self.bags(batch).values())

    whole, batch = Model(), ONE_RANK.batch(3)
    expected = whole(batch).detach()
    plan = sw.ShardingPlan({"bags": sw.EmbeddingModuleShardingPlan(ONE_RANK.shardings())})
    env = sw.ShardingEnv.local(device_type="cpu")
    model = sw.DistributedModelParallel(whole, env=env, plan=plan, sharders=[SHARDER])
    out = model.unshard()
    assert torch.equal(out(batch), expected)
    torch.nn.init.zeros_(out.over.weight)
    assert torch.equal(model(batch), expected)
