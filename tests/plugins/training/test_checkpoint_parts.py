"""Weights without optimizer state, another optimizer than the saved one, and folders that DCP alone wrote."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.errors import raises

import shardwright as sw

NAME = "embedding_bags.t.weight"
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"learning_rate": 0.5},
    "momentum": {"optimizer": "sgd", "learning_rate": 0.5, "momentum": 0.9},
    "adagrad": {"optimizer": "adagrad", "learning_rate": 0.25},
    "row_wise_adagrad": {"optimizer": "row_wise_adagrad", "learning_rate": 0.25},
    "adam": {"optimizer": "adam", "learning_rate": 0.125},
}
STATES = {
    "sgd": set(),
    "momentum": {"momentum_buffer", "step"},
    "adagrad": {"sum", "step"},
    "row_wise_adagrad": {"sum", "step"},
    "adam": {"exp_avg", "exp_avg_sq", "step"},
}
GROUPS = "optimizer.param_groups"


def bags(seed: int) -> sw.EmbeddingBagCollection:
    torch.manual_seed(seed)
    table = sw.EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
    return sw.EmbeddingBagCollection([table], device="cpu")


def model(optimizer: str, seed: int = 0, **options: Any) -> sw.DistributedModelParallel:
    block = sw.Block(sw.RowsRange(10)[0], sw.ColumnRange(0, 4), rank=0)
    sharding = sw.ParameterSharding("table_wise", "fused_torch", sw.Layout([block]))
    return sw.DistributedModelParallel(
        bags(seed),
        sw.ShardingEnv.local(device_type="cpu"),
        plan=sw.ShardingPlan({"": sw.EmbeddingModuleShardingPlan(t=sharding)}),
        sharders=[sw.EmbeddingBagCollectionSharder({**OPTIMIZERS[optimizer], **options})],
    )


def step(made: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    values = made(sw.KeyedJaggedTensor.from_lists({"f": [[3, 4], [3]]})).values()
    (values * torch.arange(8.0).view(2, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


@pytest.fixture
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[sw.DistributedModelParallel, Path]:
    made = model(request.param)
    step(made)
    sw.save_checkpoint(tmp_path, made, step=5)
    return made, tmp_path


def stored(optimizer: str) -> set[str]:
    return {f"optimizer.state.{NAME}.{entry}" for entry in STATES[optimizer]}


@pytest.mark.parametrize(("saved", "here"), [*product(OPTIMIZERS, ["sgd", "adam"])], indirect=["saved"])
def test_weights_alone_leave_the_optimizer_as_it_is(saved: Any, here: str, request: Any) -> None:
    made, other, fresh = saved[0], model(here, seed=1), model(here, seed=1)
    loaded = sw.load_checkpoint(saved[1], other, parts="weights")
    fresh.load_state_dict(made.full_state_dict())
    before = request.node.callspec.params["saved"]
    assert set(loaded.left_out) == {GROUPS, *stored(before)}
    assert (loaded.step, loaded.missing_keys, loaded.unexpected_keys) == (5, [], [])
    assert_go_on_alike(other, fresh)


@pytest.mark.parametrize(("saved", "here"), [*product(OPTIMIZERS, OPTIMIZERS)], indirect=["saved"])
def test_another_optimizer_begins_anew_and_what_was_left_out_is_said(
    saved: Any, here: str, request: Any
) -> None:
    made, other, fresh = saved[0], model(here, seed=1), model(here, seed=1)
    before = request.node.callspec.params["saved"]
    if before != here and STATES[here] | STATES[before]:
        with raises(sw.CheckpointError):
            sw.load_checkpoint(saved[1], model(here))
    loaded = sw.load_checkpoint(saved[1], other, strict=False)
    fresh.load_state_dict(made.full_state_dict())
    if before == here:
        fresh.fused_optimizer.load_state_dict(made.fused_optimizer.full_state_dict())
        assert loaded.left_out == []
    else:
        assert set(loaded.left_out) - {GROUPS} == stored(before)
    assert_go_on_alike(other, fresh, is_same_rate=before == here or GROUPS in loaded.left_out)


def assert_go_on_alike(
    one: sw.DistributedModelParallel, other: sw.DistributedModelParallel, *, is_same_rate: bool = True
) -> None:
    """The same weights and states now and after a step; rates may be those that were saved."""
    if not is_same_rate:
        for group, own in zip(
            other.fused_optimizer.param_groups, one.fused_optimizer.param_groups, strict=True
        ):
            group["lr"] = own["lr"]
    for _ in range(2):
        assert torch.equal(one.state_dict()[NAME], other.full_state_dict()[NAME])
        states = [each.fused_optimizer.state_dict()["state"].get(NAME, {}) for each in (one, other)]
        assert states[0].keys() == states[1].keys()
        assert all(
            torch.equal(torch.as_tensor(states[0][e]), torch.as_tensor(states[1][e])) for e in states[0]
        )
        step(one)
        step(other)


@pytest.mark.parametrize("saved", ["adagrad", "adam"], indirect=True)
def test_unsharded_module_takes_weights_alone_or_with_another_optimizer(saved: Any) -> None:
    made, whole = saved[0], bags(1)
    with raises(sw.CheckpointError):
        sw.load_checkpoint(saved[1], whole)
    sw.load_checkpoint(saved[1], whole, parts="weights")
    assert torch.equal(whole.state_dict()[NAME], made.state_dict()[NAME])
    optimizer = torch.optim.SGD(whole.parameters(), lr=1.0, momentum=0.5)
    loaded = sw.load_checkpoint(saved[1], whole, optimizer, strict=False)
    assert GROUPS in loaded.left_out
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 1.0
    step(whole, optimizer)
    expected = made.state_dict()[NAME][3] - torch.tensor([4.0, 6.0, 8.0, 10.0])
    assert torch.allclose(whole.state_dict()[NAME][3], expected)


@pytest.mark.parametrize("saved", ["adam"], indirect=True)
def test_other_hyperparameters_are_left_out_and_states_taken(saved: Any) -> None:
    other = model("adam", seed=1, eps=0.5, learning_rate=0.75)
    with raises(sw.CheckpointError):
        sw.load_checkpoint(saved[1], other)
    assert sw.load_checkpoint(saved[1], other, strict=False).left_out == [GROUPS]
    states = [each.fused_optimizer.state_dict()["state"][NAME] for each in (saved[0], other)]
    assert all(torch.equal(states[0][entry], states[1][entry]) for entry in ("exp_avg", "exp_avg_sq"))
    assert other.fused_optimizer.param_groups[0]["lr"] == 0.75


@pytest.mark.parametrize("saved", ["sgd"], indirect=True)
def test_parts_that_there_are_not_are_refused(saved: Any) -> None:
    with raises(sw.InvalidInputError, subject="parts", asked="wieghts", possible=["weights", "all"]):
        sw.load_checkpoint(saved[1], saved[0], parts="wieghts")


@pytest.mark.parametrize("saved", ["adam"], indirect=True)
def test_folder_without_its_manifest_is_an_error_unless_dcp_alone_wrote_it(saved: Any) -> None:
    (folder,) = saved[1].glob("step_*")
    (folder / "shardwright.json").unlink()
    other = model("adam", seed=1)
    for path in (folder, saved[1]):
        with raises(sw.CheckpointError, subject=str(folder / "shardwright.json")):
            sw.load_checkpoint(path, other)
    assert not torch.equal(other.full_state_dict()[NAME], saved[0].state_dict()[NAME])
    assert sw.load_checkpoint(folder, other, dcp_only=True).step is None
    assert torch.equal(other.full_state_dict()[NAME], saved[0].state_dict()[NAME])
