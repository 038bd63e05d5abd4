"""Checkpoints of several plans, on simulated ranks."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from tests.core.runtime.mixed_cuts import case_of
from tests.core.runtime.plans import Cut, Cuts, RowsMirrored
from tests.plugins.checkpoint.stored import save_of_ranks
from tests.plugins.checkpoint.test_sharded_state_dict import OTHERS, blank

import shardwright as sw
from shardwright.runtime.sharded.tables import table_state
from shardwright_plugins.checkpoint import entries
from shardwright_plugins.checkpoint.folder import steps_in
from shardwright_testing.simulated import run_simulated

ROWS = 1500  # more than are written as runs of single rows
BY_INDEX = Cuts(
    (
        Cut(ROWS, 4, ("a",), row_map=sw.RowsModulo(ROWS, parts=3), edges=(1,), ranks=(2, 0, 1)),
        Cut(ROWS, 2, ("b",), row_map=RowsMirrored(ROWS, 2), ranks=(0, 1)),
    ),
    3,
)
IN_RUNS = Cuts((Cut(ROWS, 4, ("a",), edges=(3,), ranks=(0, 1)), Cut(ROWS, 2, ("b",))), 2)
OTHER_INDEX = Cuts(
    (
        Cut(ROWS, 4, ("a",), row_map=RowsMirrored(ROWS, 3), ranks=(0, 1)),
        Cut(ROWS, 2, ("b",), row_map=sw.RowsModulo(ROWS, parts=4), ranks=(1, 0, 0, 1)),
    ),
    2,
)


def place_of(folder):
    """A folder, or what a function makes for a rank."""
    return folder() if callable(folder) else folder


def save(case, folder, **options):
    module = case.module()
    return run_simulated(
        lambda env: sw.save_checkpoint(place_of(folder), case.shard(env, module), **options), case.world_size
    )


def load(case, folder, **options):
    """What each rank's whole tables are after loading, and what load_checkpoint gave."""
    module = blank(case.module())

    def work(env):
        sharded = case.shard(env, module)
        loaded = sw.load_checkpoint(place_of(folder), sharded, **options)
        return sharded.full_state_dict(), loaded

    return run_simulated(work, case.world_size)


def assert_loaded(results, expected):
    for state, _ in results:
        assert all(torch.equal(state[name], weight) for name, weight in expected.items())


@pytest.fixture(params=[table_state.PIECE_BYTES, 200], ids=["one piece a block", "small pieces"])
def pieces(request, monkeypatch):
    """Tables and tensors are written in pieces of at most so many bytes."""
    monkeypatch.setattr(table_state, "PIECE_BYTES", request.param)
    monkeypatch.setattr(entries, "PIECE_BYTES", request.param)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("then", OTHERS, ids=["one rank", "modulo, columns, copies", "rows and columns"])
def test_any_plan_loads_what_another_saved(then, tmp_path):
    save(case_of(), tmp_path, step=7)
    results = load(then, tmp_path)
    assert_loaded(results, case_of().module().state_dict())
    assert {loaded.step for _, loaded in results} == {7}


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("then", [BY_INDEX, IN_RUNS, OTHER_INDEX], ids=["same", "runs", "another index"])
@pytest.mark.parametrize("first", [BY_INDEX, IN_RUNS, OTHER_INDEX], ids=["index", "runs", "other index"])
def test_rows_that_are_no_runs_are_stored_with_an_index(first, then, tmp_path):
    save(first, tmp_path)
    assert_loaded(load(then, tmp_path), first.module().state_dict())


def test_unsharded_module_loads_and_saves_too(tmp_path):
    expected = BY_INDEX.module().state_dict()
    save(BY_INDEX, tmp_path)
    module = blank(BY_INDEX.module())
    sw.load_checkpoint(tmp_path, module)
    assert all(torch.equal(module.state_dict()[name], weight) for name, weight in expected.items())
    sw.save_checkpoint(tmp_path, module)
    with pytest.raises(sw.CheckpointError, match="it has no hyperparameters"):
        load(IN_RUNS, tmp_path)
    for options in ({"strict": False}, {"parts": "weights"}):
        assert_loaded(load(IN_RUNS, tmp_path, **options), expected)
    assert list(steps_in(tmp_path)) == [1, 2]


def test_large_piece_that_is_cut_short_is_an_error_without_checksums_too(tmp_path):
    folder = sw.save_checkpoint(tmp_path, torch.nn.Linear(1024, 1025)).path
    file = next(folder.glob("*.distcp"))
    with file.open("r+b") as opened:
        opened.truncate(100_000)
    (folder / "shardwright.json").unlink()  # as of one that DCP alone wrote
    with pytest.raises(sw.CheckpointError, match=r"'model\.weight'"):
        sw.load_checkpoint(folder, torch.nn.Linear(1024, 1025), strict=False, dcp_only=True)


def test_extra_comes_back_to_each_rank_or_to_all(tmp_path):
    case, module = case_of(), case_of().module()
    run_simulated(
        lambda env: sw.save_checkpoint(tmp_path, case.shard(env, module), extra={"row": env.rank}), 2
    )
    assert [loaded.extra["row"] for _, loaded in load(case, tmp_path)] == [0, 1]
    results = load(OTHERS[1], tmp_path)
    assert [loaded.extra["row"] for _, loaded in results] == [0, 0, 0]
    assert [extra["row"] for extra in results[0][1].extras] == [0, 1]


def test_extra_that_would_have_to_be_unpickled_is_refused(tmp_path):
    with pytest.raises(
        sw.InvalidInputError, match=r"extra must be plain data.* Unsupported global: \S+ \S+Linear was"
    ):
        sw.save_checkpoint(tmp_path, torch.nn.Linear(1, 1), extra={"model": torch.nn.Linear(1, 1)})
    assert not list(tmp_path.iterdir())


def test_keep_leaves_the_newest(tmp_path):
    module = torch.nn.Linear(2, 1)
    for step in (1, 5, 9, 12):
        sw.save_checkpoint(tmp_path, module, step=step, keep=2)
    assert list(steps_in(tmp_path)) == [9, 12]
    with pytest.raises(sw.InvalidInputError, match="is there already"):
        sw.save_checkpoint(tmp_path, module, step=9)
    with pytest.raises(sw.CheckpointError, match="has no checkpoint of step 5; it has 9, 12"):
        sw.load_checkpoint(tmp_path, module, step=5)


def test_keep_never_removes_what_was_just_saved(tmp_path):
    module = torch.nn.Linear(2, 1)
    for step in (60, 80):
        sw.save_checkpoint(tmp_path, module, step=step)
    assert sw.save_checkpoint(tmp_path, module, step=50, keep=2).path.is_dir()
    assert list(steps_in(tmp_path)) == [50, 80]
    sw.save_checkpoint(tmp_path, module, step=55, keep=1)
    assert list(steps_in(tmp_path)) == [55]


def test_asynchronous_checkpoint_is_of_when_it_was_called(tmp_path):
    module = torch.nn.Linear(2, 1)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    saving = sw.save_checkpoint(tmp_path, module, asynchronous=True)
    torch.nn.init.zeros_(module.weight)
    assert saving.wait(60).is_complete
    sw.load_checkpoint(tmp_path, module)
    assert torch.equal(module.weight, before["weight"])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_progress_counts_the_bytes_of_tensors_up_to_all_of_them(asynchronous, tmp_path, monkeypatch):
    monkeypatch.setattr(entries, "PIECE_BYTES", 800)
    made, told = torch.nn.Linear(100, 10, bias=False), []
    sw.save_checkpoint(
        tmp_path, made, asynchronous=asynchronous, progress=lambda *bytes_: told.append(bytes_)
    ).wait(60)
    done = [done for done, _ in told]
    assert done == sorted(done)
    assert {total for _, total in told} == {4000}
    assert done[-1] == 4000
    assert len(set(done)) == 5


def test_progress_that_cannot_be_called_is_an_error(tmp_path):
    with pytest.raises(sw.InvalidInputError, match="progress must be a function"):
        sw.save_checkpoint(tmp_path, torch.nn.Linear(1, 1), progress=True)


def test_another_shape_or_name_is_an_error_that_says_what_differs_and_changes_nothing(tmp_path):
    save(case_of(), tmp_path)
    first, second, third = case_of().tables
    wider = Cuts((first, evolve(second, dim=7, edges=()), third), 2)
    with pytest.raises(sw.CheckpointError) as error:
        load(wider, tmp_path)
    assert (
        "table 't1' (9 x 7 FP32): 'model.embedding_bags.t1.weight' has the shape [9, 6], not [9, 7]"
        in str(error.value)
    )
    fewer = Cuts((first, second), 2)
    with pytest.raises(sw.CheckpointError, match=r"the model has no place for 'model\.embedding_bags\.t2"):
        load(fewer, tmp_path)
    whole = case_of().module().state_dict()
    results = load(fewer, tmp_path, strict=False)
    assert_loaded(results, {name: whole[name] for name in fewer.module().state_dict()})
    assert results[0][1].unexpected_keys == ["model.embedding_bags.t2.weight"]


@pytest.mark.parametrize("made", [False, True], ids=["save", "load"])
@pytest.mark.parametrize("what", ["path", "step"])
def test_ranks_that_name_different_checkpoints_are_one_error(tmp_path, what, made):
    case = case_of()
    for folder in ("0", "1"):
        for step in (1, 2) if made else ():
            save(case, tmp_path / folder, step=step)

    def work(env):
        call = sw.load_checkpoint if made else sw.save_checkpoint
        path, step = (tmp_path / str(env.rank), 1) if what == "path" else (tmp_path / "0", 1 + env.rank)
        with pytest.raises(sw.DistributedError) as error:
            call(path, case.shard(env, case.module()), step=step)
        return str(error.value)

    (text,) = set(run_simulated(work, case.world_size))
    assert f"{what} is " in text
    assert all(f"rank {rank}" in text for rank in range(2))


def test_renames_by_table(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(2, 1))
    sw.save_checkpoint(tmp_path, torch.nn.ModuleDict({"old": module}))
    renamed = torch.nn.ModuleDict({"new": blank(torch.nn.Sequential(torch.nn.Linear(2, 1)))})
    with pytest.raises(sw.CheckpointError, match=r"lacks 'model.new.0.bias', 'model.new.0.weight'.*renames="):
        sw.load_checkpoint(tmp_path, renamed)
    sw.load_checkpoint(tmp_path, renamed, renames={"old": "new"})
    assert torch.equal(renamed["new"][0].weight, module[0].weight)
    with pytest.raises(sw.InvalidInputError, match=r"has nothing called 'olds'\. Did you mean 'old'"):
        sw.load_checkpoint(tmp_path, renamed, renames={"olds": "new"})


def test_another_dtype_is_converted_only_if_asked(tmp_path):
    module = torch.nn.Linear(2, 1)
    sw.save_checkpoint(tmp_path, module)
    half = torch.nn.Linear(2, 1).half()
    with pytest.raises(
        sw.CheckpointError, match=r"'model.weight' is torch.float32, not torch.float16; to convert"
    ):
        sw.load_checkpoint(tmp_path, half)
    sw.load_checkpoint(tmp_path, half, strict=False)
    assert torch.equal(half.weight, module.weight.half())


NAME = "model.embedding_bags.t0.weight"


@pytest.mark.parametrize("case", [BY_INDEX, IN_RUNS], ids=["by an index", "in runs"])
def test_rows_from_any_number_on_are_those_of_the_whole_table_however_it_was_cut(case, tmp_path):
    save(case, tmp_path)
    stored = sw.open_checkpoint(tmp_path)
    for name, weight in case.module().state_dict().items():
        found = stored.tensor(f"model.{name}")
        assert (found.shape, found.dtype) == (tuple(weight.shape), torch.float32)
        for start, stop in ((0, len(weight)), (700, 800), (len(weight) - 1, len(weight))):
            rows = torch.empty(stop - start, weight.shape[1])
            found.read(rows, start)
            assert torch.equal(rows, weight[start:stop])


def test_tensor_that_dcp_alone_wrote_is_read(tmp_path):
    save_of_ranks([{"model": {"weight": torch.arange(6.0).view(3, 2)}}], tmp_path)
    rows = torch.empty(2, 2)
    sw.open_checkpoint(tmp_path, dcp_only=True).tensor("model.weight").read(rows, 1)
    assert rows.tolist() == [[2.0, 3.0], [4.0, 5.0]]


def test_name_that_is_not_there_is_an_error_with_the_nearest(tmp_path):
    save(IN_RUNS, tmp_path)
    with pytest.raises(sw.CheckpointError, match=rf"no tensor '{NAME}s'.* Did you mean '{NAME}'"):
        sw.open_checkpoint(tmp_path).tensor(f"{NAME}s")
    with pytest.raises(sw.CheckpointError, match="no checkpoint"):
        sw.open_checkpoint(tmp_path / "nowhere")


def test_unshard_gives_the_module_that_was_sharded():
    case = case_of()

    def work(env):
        sharded = case.shard(env, case.module())
        return sharded.unshard()

    batch = case.batch(3)
    for module in run_simulated(work, case.world_size):
        assert type(module) is sw.EmbeddingBagCollection
        assert torch.equal(module(batch).values(), case.module()(batch).values())
