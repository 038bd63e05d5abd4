"""Weights that are streamed into sharded tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.core.runtime.conftest import only_loops  # noqa: F401 - kernels that are there in any case
from tests.core.runtime.plans import Cut, Cuts
from tests.errors import raises
from tests.plugins.checkpoint.test_save_and_load import BY_INDEX, IN_RUNS, ROWS

from shardwright.errors import InvalidInputError, UnknownNameError
from shardwright_plugins import pretrained
from shardwright_plugins.pretrained import load_pretrained
from shardwright_testing.simulated import run_simulated

WEIGHTS = np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 4)


def npy(folder):
    np.save(folder / "w.npy", WEIGHTS)
    return np.load(folder / "w.npy", mmap_mode="r")


def parquet(folder):
    pa, written = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    written.write_table(pa.table({"w": list(WEIGHTS)}), folder / "w.parquet", row_group_size=400)
    batches = written.ParquetFile(folder / "w.parquet").iter_batches()
    return [np.stack(batch["w"].to_numpy(zero_copy_only=False)) for batch in batches]


def safetensors(folder):
    files = pytest.importorskip("safetensors.torch")
    files.save_file({"w": torch.from_numpy(WEIGHTS)}, folder / "w.safetensors")
    return pytest.importorskip("safetensors").safe_open(folder / "w.safetensors", "pt").get_slice("w")


SOURCES = {
    "tensor": lambda folder: torch.from_numpy(WEIGHTS),
    "array of doubles": lambda folder: WEIGHTS.astype(np.float64),
    "npy": npy,
    "parquet": parquet,
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
        load_pretrained(sharded, "t0", given)
        return sharded.full_state_dict()

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
            load_pretrained(IN_RUNS.shard(env, IN_RUNS.module()), "t0", source)

    run_simulated(work, IN_RUNS.world_size)


def loaded(source):
    """The table after loading, on a rank that has all of it."""
    module = ONE_RANK_TABLE.module()

    def work(env):
        sharded = ONE_RANK_TABLE.shard(env, module)
        load_pretrained(sharded, "t0", source)
        return sharded.full_state_dict()["embedding_bags.t0.weight"]

    return run_simulated(work, 1)[0]


ONE_RANK_TABLE = Cuts((Cut(ROWS, 4, ("a",)),), 1)
NO_NUMBERS = {
    "complex64": lambda: WEIGHTS.astype(np.complex64),
    "<U2": lambda: np.full(WEIGHTS.shape, "ab"),
    "object": lambda: np.full(WEIGHTS.shape, None),
    "mask": lambda: np.ma.masked_equal(WEIGHTS, 3),
    "meta": lambda: torch.empty(ROWS, 4, device="meta"),
    "sparse": lambda: torch.from_numpy(WEIGHTS).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([*torch.from_numpy(WEIGHTS)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.from_numpy(WEIGHTS), 1.0, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("asked", NO_NUMBERS)
def test_weights_that_are_no_numbers_are_refused_by_name(asked, in_blocks):
    weights = NO_NUMBERS[asked]()
    with raises(InvalidInputError, asked=asked) as caught:
        loaded([weights] if in_blocks else weights)
    assert "'t0'" in str(caught.value)


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i4", "longdouble", "u2", "f2"])
def test_numbers_of_any_form_are_taken(dtype):
    weights = (WEIGHTS % 1000).astype(dtype)
    assert torch.equal(loaded(weights), torch.from_numpy(WEIGHTS % 1000))


def test_unknown_table_and_what_is_no_source_are_refused():
    def work(env):
        sharded = IN_RUNS.shard(env, IN_RUNS.module())
        with raises(UnknownNameError, asked="t2", possible=["t0", "t1"]):
            load_pretrained(sharded, "t2", WEIGHTS)
        for source in ("weights.npy", 7):
            with raises(InvalidInputError, subject="t0", asked=type(source).__name__):
                load_pretrained(sharded, "t0", source)

    run_simulated(work, IN_RUNS.world_size)
