"""Tables in stores train as the unsharded module, are saved and loaded under other plans, and survive their process."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import shardwright_hash_embedding
import shardwright_store
import torch
from attrs import evolve
from shardwright_hash_embedding import HashSettings, HashTable
from shardwright_store import FOLDER_VARIABLE, LmdbCaching
from shardwright_store.store import RowStore
from tests import readme
from tests.contrib.distributions import ROOT
from tests.contrib.store.training import DIM, ROWS, SIZES, model_of, train
from tests.equality import Case, Table, assert_equals_unsharded, train_simulated
from tests.plugins.compute_kernels.larger_than_memory import planned

import shardwright as sw
from shardwright.host import PluginHost, use_host
from shardwright_testing import ComputeKernelTests, installed, run_simulated
from shardwright_testing.equality.checkpoints import check_checkpoint

KERNEL = "lmdb_caching"
TENTH = sw.ParameterConstraints(cache_params=sw.CacheParams(0.09))


pytestmark = pytest.mark.usefixtures("plugins")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of stores, in processes that a test starts too."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "stores"))
    return tmp_path / "stores"


@pytest.mark.parametrize("pooling", ["MEAN", "NONE"])
@pytest.mark.parametrize(
    ("optimizer", "parameters"),
    [("adam", ()), ("row_wise_adagrad", (("initial_accumulator_value", 0.3),))],
)
def test_types_of_tables_of_ten_times_their_caches_equal_unsharded(
    pooling: str, optimizer: str, parameters: tuple[tuple[str, Any], ...], folder: Path
) -> None:
    tables = [
        Table(700, 8, ("a",), pooling, "table_wise", KERNEL, offset=1),
        Table(1400, 8, ("b", "a"), pooling, "row_wise", KERNEL),
        Table(700, 8, ("b",), pooling, "column_wise", KERNEL),
        Table(700, 8, ("a",), pooling, "data_parallel", KERNEL),
    ]
    case = Case(tables, (30, 20), optimizer, parameters=parameters, constraints=TENTH)
    assert_equals_unsharded(case, train_simulated(case))
    stores = [path.name for path in folder.iterdir()]
    assert len(stores) == len({*stores}) >= 6  # one of each group of blocks of each rank


class StoredKeys(HashTable):
    """Rows are born and evicted in a store: a hash table before the kernel of stored rows."""

    name, rows_kernel = "stored_keys", KERNEL
    caches_rows, further_tiers = True, ("disk",)


@pytest.mark.parametrize("pooling", ["SUM", "NONE"])
def test_keys_have_rows_in_a_store(pooling: str, folder: Path) -> None:
    rule = evolve(HashSettings().constraints(), cache_params=sw.CacheParams(0.5))
    table = Table(40, 4, ("a",), pooling, "hash_rows", "stored_keys")
    case = Case([table], (6, 4), "adam", has_keys=True, constraints=rule)
    own = PluginHost(plugins={"store": shardwright_store, "keys": shardwright_hash_embedding})
    with use_host(own), installed(StoredKeys()):
        assert_equals_unsharded(case, train_simulated(case))
    assert len({path.name for path in folder.iterdir()}) >= 2


@pytest.mark.parametrize(("other", "ranks"), [("fused_torch", (3, 2, 2)), (KERNEL, (3,))])
def test_checkpoint_is_loaded_under_other_plans_and_by_other_ranks(
    other: str, ranks: tuple[int, ...]
) -> None:
    names = {"row_wise": "column_wise", "table_wise": "row_wise", "column_wise": "table_wise"}
    tables = [Table(700, 8, ("a",), "SUM", name, KERNEL) for name in names]
    case = Case(tables, (30, 20), "adam", constraints=TENTH)
    moved = [evolve(table, sharding_type=names[table.sharding_type], kernel=other) for table in tables]
    check_checkpoint("stores", case, evolve(case, tables=moved, batch_sizes=ranks))


def start(*arguments: str) -> subprocess.Popen[str]:
    root = str(ROOT / "store")
    paths = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.contrib.store.training", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    )


def test_process_that_is_killed_loses_nothing_that_was_committed(folder: Path) -> None:
    """Rows, optimizer state and the number of steps are those of the commit, not of the step after it."""
    with start("1000") as killed:
        assert killed.stdout is not None
        for line in killed.stdout:
            told = json.loads(line)
            if told.get("step") == 7:  # the commit before was after step 5
                killed.send_signal(signal.SIGKILL)
                break
        lines = [told, *map(json.loads, filter(str.strip, killed.stdout))]
        last = max([5, *(told["committed"] for told in lines if "committed" in told)])
    assert killed.returncode == -signal.SIGKILL
    model, expected = model_of(), model_of("fused_torch")
    for step in range(last + 1):
        train(expected, step)
    assert shardwright_store.restore(model) == last
    for step in range(last + 1, last + 4):
        torch.testing.assert_close(model.full_state_dict(), expected.full_state_dict())
        torch.testing.assert_close(
            *(each.fused_optimizer.full_state_dict()["state"] for each in (model, expected))
        )
        train(model, step)
        train(expected, step)


def weights_of(model: sw.DistributedModelParallel) -> torch.Tensor:
    return model.full_state_dict()["embedding_bags.t.weight"].clone()


def test_restore_forgets_what_was_not_committed_and_is_refused_where_nothing_was(folder: Path) -> None:
    model = model_of()
    with pytest.raises(
        sw.InvalidInputError, match=r"committed at the steps \[\[None\]\].*restored under the plan of then"
    ):
        shardwright_store.restore(model)
    train(model, 0)
    shardwright_store.commit(model, 40)
    committed = weights_of(model)
    train(model, 1)
    assert not torch.equal(weights_of(model), committed)
    assert shardwright_store.restore(model) == 40
    assert torch.equal(weights_of(model), committed)


def test_rank_that_cannot_commit_is_named_on_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, sharders, plan = planned(KERNEL, "row_wise", ranks=2, **SIZES)

    def run(env: sw.ShardingEnv) -> str:
        model = sw.DistributedModelParallel(module, env=env, plan=plan, sharders=sharders)
        with pytest.raises(Exception, match="the disk is gone") as told:
            shardwright_store.commit(model, 7)
        return type(told.value).__name__

    def commit(store: Any, told: Any) -> None:
        if "part1of2" in store.path.name:
            raise OSError("the disk is gone")

    monkeypatch.setattr(RowStore, "commit", commit)
    assert run_simulated(run, 2) == ["DistributedError", "OSError"]


def test_ranks_that_committed_different_steps_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of()
    shardwright_store.commit(model, 3)
    communicator = model.env.everyone.communicator
    monkeypatch.setattr(communicator, "all_gather_objects", lambda own: [own, [6]], raising=False)
    with pytest.raises(sw.InvalidInputError, match=r"committed at the steps \[\[3\], \[6\]\]"):
        shardwright_store.restore(model)


def test_store_that_is_in_use_is_not_opened_again(folder: Path) -> None:
    model = model_of()
    with pytest.raises(sw.InvalidInputError, match=f"{next(folder.iterdir()).name} is in use"):
        model_of()
    train(model, 0)


def test_store_of_another_table_is_refused_and_one_of_the_same_begins_anew(folder: Path) -> None:
    model = model_of()
    train(model, 0)
    shardwright_store.commit(model, 0)
    del model
    with pytest.raises(sw.InvalidInputError, match=rf"has rows of .*\[{ROWS}, {ROWS}\].*\[900, 900\]"):
        model_of(rows=900)
    again, plain = model_of(), model_of("fused_torch")
    for step in range(3):
        torch.testing.assert_close(again.full_state_dict(), plain.full_state_dict())
        train(again, step)
        train(plain, step)


def test_store_that_the_disk_has_no_room_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sw.UnsupportedError, match=r"do not fit on the disk of .*, which has \d+ bytes left"):
        RowStore(tmp_path, [], 1 << 60)


def test_disk_that_runs_full_refuses_a_write_and_leaves_what_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RowStore(tmp_path, [], 1 << 20)
    store.add("rows", bytes(8))
    rows, values = np.arange(3), np.ones((3, 8), np.uint8)
    store.write("rows", rows, values)
    store.commit({"step": 7})
    room = SimpleNamespace(f_bavail=100, f_frsize=4096)
    monkeypatch.setattr(os, "fstatvfs", lambda file: room)
    for writes in (lambda: store.write("rows", rows, 2 * values), lambda: store.commit({"step": 8})):
        with pytest.raises(sw.UnsupportedError, match=r"which has 409600 bytes left.*committed last"):
            writes()
    assert store.restore() == {"step": 7}
    assert store.read("rows", rows) == values.tobytes()


def test_rows_of_a_store_are_read_and_written_as_those_of_a_tensor(folder: Path) -> None:
    """Slices are shared storage; other views are refused, since a copy in their place would lose what is written."""
    model: Any = model_of()
    table = next(iter(model.module.sharded_tables.values()))
    weight = table.weight_of(table.state.local[0])
    plain, index = weight.clone(), torch.tensor([7, 30, 8])
    for values in (weight, plain):
        values[3:5].zero_()
        values[index] = 2.0
        values[:, 5:][10:].copy_(torch.arange(3.0))
        values[20:25, 1:3] += 1
        values.index_copy_(0, index, torch.ones(3, DIM))
    assert torch.equal(weight.clone(), plain)
    for values in (weight, plain):
        assert torch.equal(values[2:9, 1:].index_select(0, torch.tensor([5, 1])), plain[[7, 3], 1:])
    square = index[:2, None] + torch.arange(2)
    assert torch.equal(weight[square], plain[square])
    assert torch.equal(weight[plain[:, 0] > 1], plain[plain[:, 0] > 1])
    with pytest.raises(sw.UnsupportedError, match="would be a view of rows"):
        weight.t().zero_()
    with pytest.raises(IndexError):
        weight.index_select(0, torch.tensor([ROWS]))


def test_saving_that_would_copy_all_rows_into_memory_is_refused(folder: Path, tmp_path: Path) -> None:
    model = model_of()
    with pytest.raises(sw.UnsupportedError, match="save without asynchronous=True"):
        sw.save_checkpoint(tmp_path / "saved", model, asynchronous=True)
    sw.save_checkpoint(tmp_path / "saved", model)


@pytest.mark.slow
def test_table_of_ten_times_the_memory_trains_from_a_store(folder: Path) -> None:
    """In a process that may allocate 48 MiB beyond what imports take."""
    with start("200", "48") as process:
        assert process.stdout is not None
        losses = [json.loads(line)["loss"] for line in process.stdout]
    assert process.returncode == 0
    assert losses[-1] < 0.8 * losses[0]


def test_example_of_the_readme_prints_what_it_shows(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    readme.check_output("train_and_go_on.py", ROOT / "store/README.md", tmp_path, capsys)


@pytest.mark.parametrize("step", ["x", -1, 1.5, True, 1 << 70, None])
def test_step_that_is_no_number_of_a_step_is_refused_and_nothing_is_committed(
    step: Any, folder: Path
) -> None:
    model = model_of()
    shardwright_store.commit(model, np.int64(5))
    committed = weights_of(model)
    train(model, 1)
    with pytest.raises(sw.InvalidInputError, match="step must be") as told:
        shardwright_store.commit(model, step)
    assert told.value.subject == "step"
    found = shardwright_store.restore(model)
    assert (found, type(found)) == (5, int)
    assert torch.equal(weights_of(model), committed)


def test_commit_of_an_earlier_step_is_what_restore_goes_back_to(folder: Path) -> None:
    """After a return to a checkpoint steps are counted from there."""
    model = model_of()
    shardwright_store.commit(model, 5)
    shardwright_store.commit(model, 3)
    assert shardwright_store.restore(model) == 3


def test_ranks_that_commit_different_steps_raise_and_commit_nothing(folder: Path) -> None:
    module, sharders, plan = planned(KERNEL, "row_wise", ranks=2, **SIZES)

    def work(env: sw.ShardingEnv) -> int:
        model = sw.DistributedModelParallel(module, env=env, plan=plan, sharders=sharders)
        shardwright_store.commit(model, 7)
        with pytest.raises(sw.DistributedError, match="step"):
            shardwright_store.commit(model, 8 + env.rank)
        with pytest.raises(sw.ShardwrightError, match="step must be"):
            shardwright_store.commit(model, -1 if env.rank else 9)
        return shardwright_store.restore(model)

    assert run_simulated(work, 2) == [7, 7]


@pytest.mark.parametrize(
    "call", [lambda model: shardwright_store.commit(model, 1), shardwright_store.restore]
)
def test_model_without_a_store_is_refused(call: Any, folder: Path) -> None:
    with pytest.raises(sw.InvalidInputError, match="model must be a DistributedModelParallel, got Linear"):
        call(torch.nn.Linear(1, 1))
    with pytest.raises(sw.InvalidInputError, match=r"no table of the model is in a store.*lmdb_caching"):
        call(model_of("fused_torch"))


def test_restore_without_a_folder_says_why_nothing_was_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    model = model_of()
    with pytest.raises(
        sw.InvalidInputError, match=f"nothing was committed yet. {FOLDER_VARIABLE} is not set"
    ):
        shardwright_store.restore(model)
    shardwright_store.commit(model, 4)
    assert shardwright_store.restore(model) == 4


def test_folder_in_which_no_store_can_be_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(
        sw.InvalidInputError, match=f"{FOLDER_VARIABLE} is .*file.*NotADirectoryError"
    ) as told:
        model_of()
    assert told.value.subject == FOLDER_VARIABLE


def test_reading_a_parameter_says_where_its_rows_are(folder: Path) -> None:
    model = model_of()
    (weight,) = model.parameters()
    assert tuple(weight.shape) == (ROWS, DIM)
    for read in (lambda: weight[0], lambda: weight.sum(), lambda: weight.detach().clone()):
        with pytest.raises(sw.UnsupportedError, match="full_state_dict"):
            read()
    assert "Parameter" in repr(weight)
    assert weight.grad is None
    train(model, 0)
    assert tuple(weight.grad.shape) == (ROWS, DIM)


def test_forked_process_is_refused_and_the_store_stays_as_it_was(folder: Path) -> None:
    """It would write into the same file, whose pages its parent knows otherwise."""
    model = model_of()
    train(model, 0)
    shardwright_store.commit(model, 0)
    expected = weights_of(model)
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)

    def work() -> None:
        with pytest.raises(
            sw.UnsupportedError, match="was forked: make the model in the process that trains it"
        ) as told:
            train(model, 1)
        sender.send(str(told.value))

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    assert receiver.poll(60)
    assert f"belongs to process {os.getpid()}" in receiver.recv()
    child.join(60)
    assert child.exitcode == 0
    assert torch.equal(weights_of(model), expected)
    train(model, 1)
    shardwright_store.commit(model, 1)
    assert shardwright_store.restore(model) == 1


class TestLmdbCaching(ComputeKernelTests):
    @pytest.fixture
    def compute_kernel(self) -> sw.ComputeKernel:
        return LmdbCaching()
