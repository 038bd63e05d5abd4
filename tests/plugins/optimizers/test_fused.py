from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.errors import raises
from torch import nn

from shardwright import (
    DuplicateNameError,
    InvalidInputError,
    LazyAdam,
    OptimizerSpec,
    RowWiseAdagrad,
    ShardwrightError,
    UnknownNameError,
    UnsupportedError,
    apply_optimizer_in_backward,
    optimizer_spec_of,
    register_fused_optimizer,
    spec_to_torch,
)
from shardwright.optim import fused, renaming


@pytest.fixture
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_REGISTERED", dict(fused._REGISTERED))


def parameter(optimizer_class: Any, **arguments: Any) -> nn.Parameter:
    param = nn.Parameter(torch.ones(3, 2, device="meta"))
    apply_optimizer_in_backward(optimizer_class, [param], arguments)
    return param


SPECS = [
    (torch.optim.SGD, {"lr": 0.5}, OptimizerSpec("sgd", 0.5)),
    (torch.optim.Adagrad, {"lr": 0.5}, OptimizerSpec("adagrad", 0.5, {"eps": 1e-10})),
    (torch.optim.Adagrad, {"lr": 0.5, "eps": 0.1}, OptimizerSpec("adagrad", 0.5, {"eps": 0.1})),
    (RowWiseAdagrad, {"lr": 0.5}, OptimizerSpec("row_wise_adagrad", 0.5, {"eps": 1e-10})),
    (
        torch.optim.Adam,
        {"lr": 0.5, "betas": (0.8, 0.9), "foreach": False},
        OptimizerSpec("adam", 0.5, {"beta1": 0.8, "beta2": 0.9, "eps": 1e-8}),
    ),
    (LazyAdam, {}, OptimizerSpec("adam", 1e-3, {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8})),
]


@pytest.mark.parametrize(("optimizer_class", "arguments", "expected"), SPECS)
def test_optimizer_spec_of_applied_optimizer(
    apply: Any, optimizer_class: Any, arguments: dict[str, Any], expected: OptimizerSpec
) -> None:
    param = nn.Parameter(torch.ones(3, 2))
    apply(optimizer_class, [param], arguments)
    assert optimizer_spec_of(param) == expected


@pytest.mark.parametrize(
    ("optimizer_class", "arguments", "asked"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "momentum"),
        (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}, "weight_decay"),
        (torch.optim.SGD, {"lr": 0.1, "maximize": True}, "maximize"),
        (torch.optim.Adagrad, {"lr_decay": 0.1}, "lr_decay"),
        (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}, "initial_accumulator_value"),
        (torch.optim.Adam, {"amsgrad": True}, "amsgrad"),
        (torch.optim.Adam, {"weight_decay": 0.1}, "weight_decay"),
        (LazyAdam, {"weight_decay": 0.1}, "weight_decay"),
        (RowWiseAdagrad, {"weight_decay": 0.1}, "weight_decay"),
    ],
)
def test_optimizer_spec_of_hyperparameter_without_counterpart_names_it(
    optimizer_class: Any, arguments: dict[str, Any], asked: str
) -> None:
    with raises(UnsupportedError, subject="w", asked=asked, possible=["lr"]):
        optimizer_spec_of(parameter(optimizer_class, **arguments), "w")


def test_optimizer_spec_of_unknown_class_names_it_and_the_known() -> None:
    known = ["torch.optim.SGD", "torch.optim.Adam"]
    with raises(UnsupportedError, subject="w", asked="torch.optim.RMSprop", possible=known):
        optimizer_spec_of(parameter(torch.optim.RMSprop), "w")


def test_optimizer_spec_of_two_optimizers_is_refused() -> None:
    param = parameter(torch.optim.SGD, lr=0.1)
    apply_optimizer_in_backward(torch.optim.Adam, [param], {})
    with pytest.raises(
        UnsupportedError, match=r"2 optimizers in backward \(torch.optim.SGD, torch.optim.Adam\)"
    ):
        optimizer_spec_of(param)


def test_optimizer_spec_of_ignores_what_a_scheduler_left() -> None:
    param = parameter(torch.optim.SGD, lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(param._in_backward_optimizers[0], lambda step: 0.5)
    assert optimizer_spec_of(param) == OptimizerSpec("sgd", 0.05)


@pytest.mark.usefixtures("_own_registry")
def test_register_makes_a_class_known() -> None:
    register_fused_optimizer(
        torch.optim.RMSprop, "rms", renaming({"lr": "learning_rate", "alpha": "decay", "eps": "eps"})
    )
    assert optimizer_spec_of(parameter(torch.optim.RMSprop, lr=0.1)) == OptimizerSpec(
        "rms", 0.1, {"decay": 0.99, "eps": 1e-8}
    )


@pytest.mark.usefixtures("_own_registry")
def test_register_twice_the_same_is_nothing_and_otherwise_an_error() -> None:
    mapping = renaming({"lr": "learning_rate"})
    register_fused_optimizer(torch.optim.RMSprop, "rms", mapping)
    register_fused_optimizer(torch.optim.RMSprop, "rms", mapping)
    with pytest.raises(DuplicateNameError, match=r"torch.optim.RMSprop is registered as 'rms'"):
        register_fused_optimizer(torch.optim.RMSprop, "other", mapping)


@pytest.mark.parametrize(
    ("spec", "expected_class", "hyperparameters"),
    [
        (OptimizerSpec("sgd", 0.5), torch.optim.SGD, {"lr": 0.5}),
        (OptimizerSpec("adagrad", 0.5), torch.optim.Adagrad, {"lr": 0.5, "eps": 1e-8}),
        (
            OptimizerSpec("row_wise_adagrad", 0.5),
            RowWiseAdagrad,
            {"lr": 0.5, "eps": 1e-8, "weight_decay": 0.0},
        ),
        (
            OptimizerSpec("adam", 0.5, {"beta1": 0.8}),
            LazyAdam,
            {"lr": 0.5, "betas": (0.8, 0.999), "eps": 1e-8},
        ),
    ],
)
def test_spec_to_torch_fills_in_fbgemms_defaults(
    spec: OptimizerSpec, expected_class: Any, hyperparameters: dict[str, Any]
) -> None:
    optimizer = spec_to_torch(spec, [nn.Parameter(torch.ones(2, 2))])
    assert type(optimizer) is expected_class
    assert {name: optimizer.param_groups[0][name] for name in hyperparameters} == hyperparameters


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (
            OptimizerSpec("adagard"),
            UnknownNameError,
            r"'adagard'. Known: adagrad, adam, .* Did you mean 'adagrad'",
        ),
        (
            OptimizerSpec("sgd", 1.0, {"initial_accumulator_value": 0.1}),
            InvalidInputError,
            r"'sgd' has no parameter 'initial_accumulator_value'. Known: learning_r",
        ),
    ],
)
def test_spec_to_torch_what_is_not_known_is_named(
    spec: OptimizerSpec, error: type[ShardwrightError], message: str
) -> None:
    with pytest.raises(error, match=message):
        spec_to_torch(spec, [nn.Parameter(torch.ones(2, 2))])
