"""Optimizers that run in the backward pass: how they are asked for, and the torch optimizers of sparse gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.errors import raises
from torch import Tensor, nn

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


ROWS, COLUMNS = 6, 3


BATCHES = st.lists(st.lists(st.integers(0, ROWS - 1), max_size=8), min_size=1, max_size=4)


def sparse_gradient(ids: list[int], values: Tensor) -> Tensor:
    indices = torch.tensor([ids], dtype=torch.int64).reshape(1, -1)
    return torch.sparse_coo_tensor(indices, values, (ROWS, COLUMNS), check_invariants=True)


def dense_gradient(ids: list[int], values: Tensor) -> Tensor:
    return torch.zeros(ROWS, COLUMNS).index_add(0, torch.tensor(ids, dtype=torch.int64), values)


def train(
    optimizer_class: Any, batches: list[list[int]], make_gradient: Any, **arguments: Any
) -> nn.Parameter:
    """Step once a batch; the gradients depend on the seed only."""
    generator = torch.Generator().manual_seed(3)
    param = nn.Parameter(torch.randn(ROWS, COLUMNS, generator=generator))
    optimizer = optimizer_class([param], **arguments)
    for ids in batches:
        values = torch.randn(len(ids), COLUMNS, generator=generator)
        param.grad = make_gradient(ids, values)
        optimizer.step()
    return param


def by_rows(update: Any, batches: list[list[int]]) -> Tensor:
    """The same, one Python float at a time: ``update(step, row, gradient, state)`` of each touched row."""
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(ROWS, COLUMNS, generator=generator).double().tolist()
    states: list[dict[str, Any]] = [{} for _ in range(ROWS)]
    for step, ids in enumerate(batches, 1):
        values = torch.randn(len(ids), COLUMNS, generator=generator).double().tolist()
        for row in sorted(set(ids)):
            gradient = [
                sum(value[column] for id_, value in zip(ids, values, strict=True) if id_ == row)
                for column in range(COLUMNS)
            ]
            table[row] = update(step, table[row], gradient, states[row])
    return torch.tensor(table)


def row_wise_adagrad(lr: float, eps: float, weight_decay: float = 0.0) -> Any:
    def update(step: int, row: list[float], gradient: list[float], state: dict[str, Any]) -> list[float]:
        gradient = [g + weight_decay * w for g, w in zip(gradient, row, strict=True)]
        state["sum"] = state.get("sum", 0.0) + sum(g * g for g in gradient) / len(gradient)
        return [w - lr * g / (math.sqrt(state["sum"]) + eps) for w, g in zip(row, gradient, strict=True)]

    return update


def lazy_adam(lr: float, beta1: float, beta2: float, eps: float, weight_decay: float = 0.0) -> Any:
    def update(step: int, row: list[float], gradient: list[float], state: dict[str, Any]) -> list[float]:
        updated = []
        for column, (w, g) in enumerate(zip(row, gradient, strict=True)):
            m, v = state.get(column, (0.0, 0.0))
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            state[column] = m, v
            direction = (m / (1 - beta1**step)) / (math.sqrt(v / (1 - beta2**step)) + eps)
            updated.append(w - lr * (direction + weight_decay * w))
        return updated

    return update


GRADIENTS = pytest.mark.parametrize("make_gradient", [dense_gradient, sparse_gradient])


@GRADIENTS
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@given(batches=BATCHES)
@settings(max_examples=60, deadline=None)
def test_row_wise_adagrad_any_batches_equals_loop(
    make_gradient: Any, weight_decay: float, batches: list[list[int]]
) -> None:
    param = train(RowWiseAdagrad, batches, make_gradient, lr=0.3, eps=0.01, weight_decay=weight_decay)
    torch.testing.assert_close(param.detach(), by_rows(row_wise_adagrad(0.3, 0.01, weight_decay), batches))


@GRADIENTS
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@given(batches=BATCHES)
@settings(max_examples=60, deadline=None)
def test_lazy_adam_any_batches_equals_loop(
    make_gradient: Any, weight_decay: float, batches: list[list[int]]
) -> None:
    param = train(
        LazyAdam, batches, make_gradient, lr=0.3, betas=(0.8, 0.95), eps=0.01, weight_decay=weight_decay
    )
    expected = by_rows(lazy_adam(0.3, 0.8, 0.95, 0.01, weight_decay), batches)
    torch.testing.assert_close(param.detach(), expected)


@pytest.mark.parametrize("optimizer_class", [RowWiseAdagrad, LazyAdam])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_table_keeps_float32_state(optimizer_class: Any, dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.randn(ROWS, COLUMNS).to(dtype))
    twin = nn.Parameter(param.detach().float())
    gradient = torch.randn(ROWS, COLUMNS).to(dtype)
    for own in (param, twin):
        own.grad = gradient.to(own.dtype)
        optimizer = optimizer_class([own], lr=0.1)
        optimizer.step()
        assert all(value.dtype is torch.float32 for value in optimizer.state[own].values())
    torch.testing.assert_close(param.detach(), twin.detach().to(dtype))


def test_step_closure_loss_is_returned() -> None:
    param = nn.Parameter(torch.ones(2, 2))

    def closure() -> Tensor:
        loss = param.square().sum()
        loss.backward()
        return loss

    assert RowWiseAdagrad([param], lr=0.5).step(closure).item() == 4.0
    assert param.detach().max() < 1


@pytest.mark.parametrize("optimizer_class", [RowWiseAdagrad, LazyAdam])
@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay"])
def test_negative_hyperparameter_is_named(optimizer_class: Any, name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{optimizer_class.__name__}: {name} must not be .* -1"):
        optimizer_class([nn.Parameter(torch.ones(1, 1))], **{name: -1})


def test_lazy_adam_beta_out_of_range_is_shown() -> None:
    with pytest.raises(InvalidInputError, match=r"\(0.9, 1.0\)"):
        LazyAdam([nn.Parameter(torch.ones(1, 1))], betas=(0.9, 1.0))


def test_parameter_that_is_no_table_is_refused_with_its_shape() -> None:
    with pytest.raises(InvalidInputError, match=r"of shape \[3\]"):
        RowWiseAdagrad([nn.Parameter(torch.ones(3))])
