"""`shardwright checkpoint`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.errors import files_of_at_most, raises
from tests.plugins.checkpoint.stored import save_of_ranks
from typer.testing import CliRunner

import shardwright as sw
from shardwright.cli import app
from shardwright_plugins.checkpoint.reading import StoredCheckpoint
from shardwright_plugins.checkpoint.requests import box_requests
from shardwright_plugins.commands.checkpoint.converting import to_file

ROWS = 1200


def model(seed=0):
    torch.manual_seed(seed)
    tables = [
        sw.EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=4, feature_names=[name])
        for name in ("user", "item")
    ]
    bags = sw.EmbeddingBagCollection(tables, device="cpu")
    layout = sw.Layout([sw.BlockRun(sw.RowsModulo(ROWS, parts=2), sw.ColumnRange(0, 4), 2)]).placed([0, 0])
    sharding = {
        "user": sw.ParameterSharding("row_wise", "fused_torch", layout),
        "item": sw.ParameterSharding(
            "table_wise",
            "fused_torch",
            sw.Layout([sw.BlockRun(sw.RowsRange(ROWS), sw.ColumnRange(0, 4), rank=0)]),
        ),
    }
    plan = sw.ShardingPlan({"": sw.EmbeddingModuleShardingPlan(sharding)})
    sharders = [sw.EmbeddingBagCollectionSharder({"optimizer": "adam", "learning_rate": 0.125})]
    made = sw.DistributedModelParallel(
        bags, env=sw.ShardingEnv.local(device_type="cpu"), plan=plan, sharders=sharders
    )
    batch = sw.KeyedJaggedTensor.from_lists({"user": [7, 8], "item": [[3], []]})
    made(batch).values().sum().backward()
    return made


def run(*arguments):
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def same(first, second):
    return all(
        torch.equal(torch.as_tensor(second[name]), torch.as_tensor(value)) for name, value in first.items()
    )


@pytest.fixture
def saved(tmp_path):
    made = model()
    sw.save_checkpoint(tmp_path / "own", made, step=8)
    return made, tmp_path / "own"


def test_show_lists_tables_optimizer_and_plan(saved):
    text = run("show", saved[1])
    assert "step 8, written by 1 rank\n" in text
    assert "model.embedding_bags.item.weight" in text
    assert "1200 x 4" in text
    assert "optimizer of 2 parameters: lr=0.125" in text
    assert "plan: user: row_wise, fused_torch" in text


def test_show_as_json(saved):
    found = json.loads(run("show", saved[1], "--json"))
    shapes = {entry["name"]: entry["shape"] for entry in found["entries"]}
    assert shapes["optimizer.state.embedding_bags.item.weight.exp_avg"] == [ROWS, 4]
    assert found["plan"][""]["item"] == "table_wise, fused_torch"


def test_verify_says_that_files_are_whole_or_which_is_not(saved):
    assert "as they were written" in run("verify", saved[1])
    path = saved[1] / "step_0000000008" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    with pytest.raises(sw.CheckpointError, match=r"__0_0\.distcp was altered"):
        run("verify", saved[1])


def test_convert_to_a_file_and_back_keeps_everything(saved, tmp_path):
    made, folder = saved
    run("convert", folder, tmp_path / "all.pt")
    plain = torch.load(tmp_path / "all.pt", weights_only=True)
    assert same(made.full_state_dict(), plain["model"])
    run("convert", tmp_path / "all.pt", tmp_path / "back", "--step", 9)
    other = model(seed=5)
    assert sw.load_checkpoint(tmp_path / "back", other).step == 9
    assert same(made.full_state_dict(), other.full_state_dict())
    states = [each.fused_optimizer.state_dict()["state"] for each in (made, other)]
    assert all(same(state, states[1][name]) for name, state in states[0].items())


@pytest.mark.parametrize(
    "nest", [lambda state: state, lambda state: {"model": state}], ids=["flat", "nested"]
)
def test_convert_takes_what_dcp_alone_wrote(nest, saved, tmp_path):
    state = saved[0].state_dict()
    save_of_ranks([nest(state)], tmp_path / "dcp")
    run("convert", tmp_path / "dcp", tmp_path / "own2", "--step", 3)
    assert "as they were written" in run("verify", tmp_path / "own2")
    other = model(seed=5)
    sw.load_checkpoint(tmp_path / "own2", other, strict=False)
    assert same(state, other.full_state_dict())
    for command in ("verify", "show"):
        with raises(sw.CheckpointError, subject=str(tmp_path / "dcp" / "shardwright.json")):
            run(command, tmp_path / "dcp")
    assert json.loads(run("show", tmp_path / "dcp", "--dcp-only", "--json"))["step"] is None


# Written by torchrec_writes.py, which has these figures.
TORCHREC = Path(__file__).with_name("torchrec")
TABLES, DIM, STEPS = {"user": 20, "item": 12, "shop": 10}, 8, 3


def torchrecs_model():
    torch.manual_seed(5)
    tables = [
        sw.EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
        for name, rows in TABLES.items()
    ]
    bags = sw.EmbeddingBagCollection(tables, device="cpu")
    sharder = sw.EmbeddingBagCollectionSharder(
        {"optimizer": "row_wise_adagrad", "learning_rate": 0.125, "eps": 1e-8}
    )
    return sw.DistributedModelParallel(
        torch.nn.ModuleDict({"bags": bags}), env=sw.ShardingEnv.local(device_type="cpu"), sharders=[sharder]
    )


def test_convert_takes_the_optimizer_of_torchrec_and_training_goes_on_as_there(tmp_path):
    run("convert", TORCHREC, tmp_path, "--step", STEPS)
    made = torchrecs_model()
    loaded = sw.load_checkpoint(tmp_path, made, strict=False)
    assert (loaded.step, loaded.missing_keys, loaded.unexpected_keys) == (STEPS, [], [])
    ids = [torch.arange(2 * len(TABLES)) + 3 * STEPS + rank for rank in range(2)]
    features = {
        name: [[int(own[2 * place + example]) % 10] for own in ids for example in range(2)]
        for place, name in enumerate(TABLES)
    }
    pooled = made.module["bags"](sw.KeyedJaggedTensor.from_lists(features)).values()
    # TorchRec divides the gradients of its ranks by their number.
    ((pooled * torch.linspace(-1.0, 2.0, pooled.shape[1])).sum() / 2).backward()
    after = torch.load(TORCHREC / "after.pt", weights_only=True)
    for name, weights in made.full_state_dict().items():
        if ".item." not in name:  # of which each shard of columns has its own sums there
            torch.testing.assert_close(weights, after[name])
    states = made.fused_optimizer.full_state_dict()["state"]
    assert {float(own["step"]) for own in states.values()} == {STEPS + 1}


def read(path, key):
    stored = StoredCheckpoint(path, dcp_only=True)
    tensor = torch.empty(stored.entries[key].size)
    stored.read(box_requests(key, stored.entries[key], tensor, (0,) * tensor.dim()))
    return tensor


def test_convert_averages_the_states_of_torchrecs_shards_of_columns(tmp_path):
    run("convert", TORCHREC, tmp_path, "--step", 3)
    name = "optimizer.state.bags.embedding_bags.item.weight"
    whole = read(tmp_path / "step_0000000003", f"{name}.sum")
    shards = read(TORCHREC, f"{name}.item.momentum1")
    assert shards.max() > 0
    torch.testing.assert_close(whole[:, 0], (shards[:12] + shards[12:]) / 2)


def test_convert_takes_torchrecs_adam_for_torchs(tmp_path):
    weight, own = torch.rand(6, 4), "bags.embedding_bags.user.weight"
    states = {"user.momentum1": torch.rand(6, 4), "user.exp_avg_sq": torch.rand(6, 4)}
    foreign = {"model": {own: weight}, "optimizer": {"state": {own: states}}}
    save_of_ranks([foreign], tmp_path / "dcp")
    run("convert", tmp_path / "dcp", tmp_path / "own", "--step", 7)
    run("convert", tmp_path / "own", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert torch.equal(found["model"][own], weight)
    expected = {"exp_avg": states["user.momentum1"], "exp_avg_sq": states["user.exp_avg_sq"]}
    assert same({**expected, "step": torch.tensor(7.0)}, found["optimizer"]["state"][own])


def test_convert_as_json_says_where_and_how_much(saved, tmp_path):
    for target, path in (
        (tmp_path / "a.pt", tmp_path / "a.pt"),
        (tmp_path / "a", tmp_path / "a/step_0000000002"),
    ):
        told = json.loads(run("convert", saved[1], target, "--step", 2, "--json"))
        files = path.iterdir() if path.is_dir() else [path]
        assert told == {"path": str(path), "bytes": sum(file.stat().st_size for file in files)}


def test_file_that_would_run_something_is_refused(tmp_path):
    torch.save({"weight": torch.nn.Linear(1, 1)}, tmp_path / "module.pt")
    with pytest.raises(sw.CheckpointError, match="cannot be read as plain data: Unsupported global") as error:
        run("convert", tmp_path / "module.pt", tmp_path / "own")
    assert "weights_only" not in str(error.value)  # torch advises to unpickle the file
    with pytest.raises(sw.InvalidInputError, match="is a file already"):
        run("convert", tmp_path / "module.pt", tmp_path / "other.pt")


@pytest.mark.parametrize("text", ["", "hello", "{}"])
def test_convert_of_what_torch_did_not_write_says_so(text, tmp_path):
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(sw.CheckpointError, match=r"no file that torch\.save wrote"):
        run("convert", tmp_path / "a.txt", tmp_path / "own")


def test_convert_reads_files_of_an_old_torch(tmp_path):
    torch.save({"weight": torch.ones(2)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    run("convert", tmp_path / "a.pt", tmp_path / "own")
    (entry,) = json.loads(run("show", tmp_path / "own", "--json"))["entries"]
    assert entry["name"] == "model.weight"


@pytest.mark.parametrize("beside", ["opt", "epoch"])
def test_state_dict_beside_what_is_not_read_is_refused(beside, tmp_path):
    """Names that are not read would make entries of the model of all, and a checkpoint without tensors."""
    torch.save(
        {"model": {"weight": torch.ones(2)}, beside: {"opt": {"state": {}}, "epoch": 3}[beside]},
        tmp_path / "a.pt",
    )
    with pytest.raises(sw.CheckpointError, match=r"has state dicts under 'model'.* which would be lost"):
        run("convert", tmp_path / "a.pt", tmp_path / "own")
    assert not (tmp_path / "own").exists()


def test_state_dict_with_extra_state_is_converted(tmp_path):
    torch.save({"weight": torch.ones(2), "layer._extra_state": {"scale": 2.0}}, tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "own")
    (entry,) = json.loads(run("show", tmp_path / "own", "--json"))["entries"]
    assert entry["name"] == "model.weight"


def test_place_that_cannot_be_written_is_an_error_that_names_it(saved, tmp_path):
    (tmp_path / "file").write_text("mine")
    for target in (tmp_path / "none" / "all.pt", tmp_path / "file", tmp_path / "file" / "under"):
        with pytest.raises(sw.CheckpointError, match=f"{target}.* cannot be written: "):
            run("convert", saved[1], target)
    assert (tmp_path / "file").read_text() == "mine"


def test_full_disk_is_an_error_that_names_the_converted_file(saved, tmp_path):
    file = tmp_path / "whole.pt"
    with files_of_at_most(1000), raises(sw.CheckpointError, subject=str(file)):
        to_file(StoredCheckpoint(saved[1] / "step_0000000008"), file)
