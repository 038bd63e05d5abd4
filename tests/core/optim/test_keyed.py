from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from shardwright import (
    CombinedOptimizer,
    DuplicateNameError,
    InvalidInputError,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    OptimizerWrapper,
    UnknownNameError,
    UnsupportedError,
)


def adam(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1)


def sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def keyed(model: nn.Module, factory: Any = adam) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(dict(model.named_parameters()), factory)


def combined(model: nn.Module) -> CombinedOptimizer:
    """Over ``Sequential(Linear, Linear)``: Adam for the first, SGD with momentum for the second."""
    return CombinedOptimizer(
        [
            ("first", keyed(model[0])),
            ("second", keyed(model[1], lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))),
        ]
    )


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def train(model: nn.Module, optimizer: Any, steps: int = 3, seed: int = 5) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3, generator=generator)).square().mean().backward()
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def test_combined_state_dict_puts_keys_before_names() -> None:
    model = two_layers()
    optimizer = combined(model)
    train(model, optimizer, steps=1)
    state_dict = optimizer.state_dict()
    assert set(state_dict["state"]) == {"first.weight", "first.bias", "second.weight", "second.bias"}
    assert set(optimizer.params) == set(state_dict["state"])
    assert state_dict["param_groups"][1]["params"] == ["second.bias", "second.weight"]
    assert state_dict["param_groups"][1]["momentum"] == 0.9
    assert {id(param) for param in optimizer.state} == {id(param) for param in model.parameters()}
    assert optimizer.state[model[0].weight]["step"] == 1
    assert len(optimizer.state) == 4


@pytest.mark.parametrize("make", [keyed, combined, lambda model: OptimizerWrapper(combined(model))])
@pytest.mark.parametrize("warm", [False, True])
def test_load_state_dict_goes_on_where_it_was_saved(make: Any, warm: bool) -> None:
    model = two_layers()
    optimizer = make(model)
    train(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.05
    saved_model, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, seed=6)

    twin = two_layers()
    other = make(twin)
    if warm:  # state exists already, and is overwritten in place
        train(twin, other, steps=2, seed=9)
    twin.load_state_dict(saved_model)
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 0.05
    train(twin, other, seed=6)
    torch.testing.assert_close(weights(twin), weights(model), rtol=0, atol=0)


def test_load_state_dict_of_fresh_optimizer_owns_its_tensors() -> None:
    model = two_layers()
    optimizer, other = keyed(model), keyed(two_layers())
    train(model, optimizer)
    other.load_state_dict(optimizer.state_dict())
    own = other.state[other.params["0.bias"]]["exp_avg"]
    assert own is not optimizer.state[model[0].bias]["exp_avg"]


def test_save_param_groups_false_leaves_hyperparameters_out_of_it() -> None:
    model = two_layers()
    optimizer = combined(model)
    with_groups = copy.deepcopy(optimizer.state_dict())
    optimizer.save_param_groups(False)
    assert list(optimizer.state_dict()) == ["state"]
    optimizer.param_groups[0]["lr"] = 7.0
    optimizer.load_state_dict(with_groups)
    assert optimizer.param_groups[0]["lr"] == 7.0


def test_load_state_dict_groups_may_be_cut_otherwise() -> None:
    model = two_layers()
    saved = keyed(model).state_dict()
    saved["param_groups"][0]["lr"] = 0.7
    optimizer = keyed(
        model, lambda params: torch.optim.Adam([{"params": params[:1]}, {"params": params[1:]}], lr=0.1)
    )
    optimizer.load_state_dict(saved)
    assert [group["lr"] for group in optimizer.param_groups] == [0.7, 0.7]


def test_load_state_dict_contradicting_groups_are_named() -> None:
    model = two_layers()
    saved = keyed(
        model, lambda params: torch.optim.Adam([{"params": params[:2]}, {"params": params[2:], "lr": 0.2}])
    ).state_dict()
    with pytest.raises(
        InvalidInputError, match=r"'0.bias' and '1.bias' are in one group, .* lr=0.001 and lr=0.2"
    ):
        keyed(model).load_state_dict(saved)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (
            lambda saved: saved["state"].update({"0.wieght": saved["state"].pop("0.weight")}),
            UnknownNameError,
            r"1 parameters .* '0.wieght'. It has 4: .* Did you mean '0.weight'",
        ),
        (
            lambda saved: saved["state"].pop("1.bias"),
            InvalidInputError,
            r"no state for 1 of the 4 parameters, .*: '1.bias'",
        ),
        (
            lambda saved: saved["state"]["1.bias"].pop("exp_avg"),
            InvalidInputError,
            r"'1.bias' has the entries 'exp_avg', .* has 'exp_avg_sq', 'step'",
        ),
        (
            lambda saved: saved["state"]["1.weight"].update(exp_avg=torch.zeros(2, 4)),
            InvalidInputError,
            r"'exp_avg' of '1.weight' has shape \[1, 4\]; .* has \[2, 4\]",
        ),
        (
            lambda saved: saved["state"]["1.weight"].update(exp_avg="nothing"),
            InvalidInputError,
            r"'exp_avg' of '1.weight' has shape \[1, 4\]; .* has a str",
        ),
        (
            lambda saved: saved.update(states=saved.pop("state")),
            InvalidInputError,
            r"it has 'param_groups', 'states', but no 'state'",
        ),
        (
            lambda saved: saved["param_groups"][0]["params"].remove("1.weight"),
            InvalidInputError,
            r"param_groups lack 1 parameters: '1.weight'",
        ),
        (
            lambda saved: saved["param_groups"][0]["params"].append("2.weight"),
            UnknownNameError,
            r"'2.weight'. It has 4",
        ),
        (
            lambda saved: saved["param_groups"][0].pop("betas"),
            InvalidInputError,
            r"saved group of '0.bias' has no 'betas'",
        ),
    ],
    ids=[
        "unknown name",
        "missing name",
        "missing entry",
        "other shape",
        "no tensor",
        "no state",
        "group without name",
        "group with unknown name",
        "group without value",
    ],
)
def test_load_state_dict_that_does_not_fit_changes_nothing(damage: Any, error: Any, message: str) -> None:
    model = two_layers()
    optimizer = keyed(model)
    train(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["exp_avg"] += 1
    saved["param_groups"][0]["lr"] = 9.0
    before = copy.deepcopy(optimizer.state_dict())
    damage(saved)
    with pytest.raises(error, match=message):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)


def test_load_state_dict_of_fresh_optimizer_compares_matrices_with_the_parameter() -> None:
    model = two_layers()
    optimizer = keyed(model)
    train(model, optimizer)
    saved = optimizer.state_dict()
    saved["state"]["0.weight"]["exp_avg"] = torch.zeros(5, 3)
    with pytest.raises(InvalidInputError, match=r"'exp_avg' of '0.weight' has shape \[5, 3\] .* is \[4, 3\]"):
        keyed(two_layers()).load_state_dict(saved)


@pytest.mark.parametrize("entry", ["state", "param_groups"])
def test_combined_load_state_dict_that_does_not_fit_one_part_changes_no_other(entry: str) -> None:
    model = two_layers()
    optimizer = combined(model)
    train(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"]["first.bias"]["exp_avg"] += 1
    if entry == "state":
        saved["state"]["second.bias"]["momentum_buffer"] = torch.zeros(3)
    else:
        saved["param_groups"][1]["params"] = ["second.bias"]
    before = optimizer.state[model[0].bias]["exp_avg"].clone()
    with pytest.raises(InvalidInputError):
        optimizer.load_state_dict(saved)
    torch.testing.assert_close(optimizer.state[model[0].bias]["exp_avg"], before)


def test_combined_load_state_dict_unknown_name_is_given_with_its_key() -> None:
    optimizer = combined(two_layers())
    with pytest.raises(UnknownNameError, match=r"'frist.bias'. It has 4: .* Did you mean 'first.bias'"):
        optimizer.load_state_dict({"state": {"frist.bias": {}}})


def test_one_parameter_or_name_twice_is_refused() -> None:
    model = two_layers()
    with pytest.raises(DuplicateNameError, match="two of the 2 optimizers have a parameter 'weight'"):
        CombinedOptimizer([keyed(model[0]), keyed(model[1])])
    with pytest.raises(DuplicateNameError, match=r"'a.weight' and 'b.weight' are one parameter"):
        CombinedOptimizer([("a", keyed(model[0])), ("b", keyed(model[0]))])
    with pytest.raises(DuplicateNameError, match="'a' and 'b' are one parameter"):
        KeyedOptimizer({"a": model[0].bias, "b": model[0].bias}, {}, [])


@pytest.mark.parametrize("is_pair", [False, True])
def test_optimizer_of_torch_among_combined_ones_is_refused_with_what_to_wrap_it_in(is_pair: bool) -> None:
    part = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(
        InvalidInputError, match=r"Make it by KeyedOptimizerWrapper\(.*lambda params: SGD\(params, \.\.\.\)"
    ):
        CombinedOptimizer([("dense", part) if is_pair else part])


def test_combined_step_calls_the_closure_once() -> None:
    model, calls = two_layers(), []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        loss = model(torch.ones(1, 3)).sum()
        loss.backward()
        return loss

    before = weights(model)
    loss = combined(model).step(closure)
    assert calls == [True]
    assert loss.numel() == 1
    assert all(not torch.equal(own, other) for own, other in zip(weights(model), before, strict=True))


def test_scheduled_optimizer_loads_a_state_dict_from_before_the_schedule() -> None:
    model = two_layers()
    saved = keyed(model).state_dict()
    optimizer = keyed(model)
    StepLR(optimizer, step_size=1)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["initial_lr"] == 0.1


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("make", [lambda model: keyed(model, sgd), combined])
def test_copies_with_their_model_train_on(make: Any, duplicate: Any) -> None:
    model = two_layers()
    optimizer = make(model)
    train(model, optimizer)
    twin, other = duplicate((model, optimizer))
    train(model, optimizer, seed=8)
    train(twin, other, seed=8)
    torch.testing.assert_close(weights(twin), weights(model), rtol=0, atol=0)
    assert set(other.params) == set(optimizer.params)


def test_wrapper_without_parameters_says_what_to_do() -> None:
    with pytest.raises(InvalidInputError, match=r"got no parameters\. .*fused_optimizer"):
        KeyedOptimizerWrapper({}, sgd)


def test_parameter_without_a_name_is_refused() -> None:
    param, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, 5))
    with pytest.raises(
        InvalidInputError, match=r"a group has a parameter of shape \[2, 5\] .* among the 1 given"
    ):
        KeyedOptimizer({"a": param}, {}, [{"params": [other]}])
    with pytest.raises(InvalidInputError, match=r"the state has a parameter of shape \[2, 5\]"):
        KeyedOptimizer({"a": param}, {other: {}}, [])
    with pytest.raises(InvalidInputError, match="'epoch'\\. All state keys must be params"):
        KeyedOptimizer({"a": param}, {param: {}, "epoch": 2.0}, [])  # type: ignore[dict-item]


def test_add_param_group_is_refused_with_the_way_out() -> None:
    model = two_layers()
    with pytest.raises(UnsupportedError, match="CombinedOptimizer"):
        keyed(model).add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_repr_shows_the_parts() -> None:
    text = repr(combined(two_layers()))
    assert text.startswith("CombinedOptimizer(first: KeyedOptimizerWrapper")
    assert "momentum: 0.9" in text


class _Counter:
    """An object in an optimizer's state that has a state dict of its own."""

    def __init__(self, count: torch.Tensor) -> None:
        self.count = count

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.count.copy_(state["count"])


def test_objects_in_the_state_are_saved_and_loaded_by_their_own_state_dicts() -> None:
    weight, counter = torch.zeros(2), _Counter(torch.tensor([3.0]))
    optimizer = KeyedOptimizer({"weight": weight}, {weight: {"counter": counter}}, [{"params": [weight]}])
    saved = optimizer.state_dict()
    assert saved["state"]["weight"]["counter"]["count"].tolist() == [3.0]
    optimizer.load_state_dict({**saved, "state": {"weight": {"counter": {"count": torch.tensor([7.0])}}}})
    assert counter.count.tolist() == [7.0]


def one_weight(kind: Any, **settings: Any) -> tuple[nn.Parameter, KeyedOptimizerWrapper]:
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    return weight, KeyedOptimizerWrapper({"weight": weight}, lambda params: kind(params, lr=0.1, **settings))


def test_state_is_there_and_nothing_else_changed() -> None:
    weight, optimizer = one_weight(torch.optim.Adam, weight_decay=0.5)
    weight.grad = torch.ones(2)
    optimizer.init_state({"weight"})
    (state,) = optimizer.state_dict()["state"].values()
    assert {name: float(value.abs().sum()) for name, value in state.items()} == {
        "step": 0,
        "exp_avg": 0,
        "exp_avg_sq": 0,
    }
    assert optimizer.param_groups[0]["weight_decay"] == 0.5
    assert weight.tolist() == [1.0, -2.0]
    assert weight.grad.tolist() == [1.0, 1.0]


def test_training_goes_on_as_without() -> None:
    ends = []
    for makes_state in (True, False):
        weight, optimizer = one_weight(torch.optim.Adam)
        if makes_state:
            CombinedOptimizer([("one", OptimizerWrapper(optimizer))]).init_state()
        for _ in range(3):
            weight.grad = torch.tensor([0.5, -1.0])
            optimizer.step()
        ends.append(weight.tolist())
    assert ends[0] == ends[1]
