"""`shardwright checkpoint`."""

from __future__ import annotations

import json

import pytest
import torch
from tests.core.runtime.checkpoint.stored import save_of_ranks
from typer.testing import CliRunner

import shardwright as sw
from shardwright.cli import app
from shardwright.errors import CheckpointError, InvalidInputError

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
    assert "step 8, written by 1 ranks" in text
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
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp was altered"):
        run("verify", saved[1])


def test_convert_to_a_file_and_back_keeps_everything(saved, tmp_path):
    made, folder = saved
    run("convert", folder, tmp_path / "all.pt")
    plain = torch.load(tmp_path / "all.pt", weights_only=True)
    assert same(made.state_dict(), plain["model"])
    run("convert", tmp_path / "all.pt", tmp_path / "back", "--step", 9)
    other = model(seed=5)
    assert sw.load_checkpoint(tmp_path / "back", other).step == 9
    assert same(made.state_dict(), other.state_dict())
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
    assert same(state, other.state_dict())
    with pytest.raises(InvalidInputError, match="keeps no checksums"):
        run("verify", tmp_path / "dcp")


def test_file_that_would_run_something_is_refused(tmp_path):
    torch.save({"weight": torch.nn.Linear(1, 1)}, tmp_path / "module.pt")
    with pytest.raises(CheckpointError, match="cannot be read as plain data"):
        run("convert", tmp_path / "module.pt", tmp_path / "own")
    with pytest.raises(InvalidInputError, match="is a file already"):
        run("convert", tmp_path / "module.pt", tmp_path / "other.pt")
