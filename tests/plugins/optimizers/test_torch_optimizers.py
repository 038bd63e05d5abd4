from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shardwright import InvalidInputError, LazyAdam, RowWiseAdagrad

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
