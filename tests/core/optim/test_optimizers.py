from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwright import (
    InvalidInputError,
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)


def test_apply_steps_in_backward_and_clears_the_gradient(apply: Any) -> None:
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    apply(torch.optim.Adagrad, [model.weight], {"lr": 0.5})
    optimizer = torch.optim.Adagrad([twin.weight], lr=0.5)
    for _ in range(3):
        batch = torch.randn(4, 3)
        model(batch).square().sum().backward()
        optimizer.zero_grad()
        twin(batch).square().sum().backward()
        optimizer.step()
        assert model.weight.grad is None
    torch.testing.assert_close(model.weight, twin.weight)
    torch.testing.assert_close(model.bias.grad, twin.bias.grad)


def test_apply_parameter_without_gradient_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"SGD .* shape \[2, 3\]: requires_grad is False"):
        apply_optimizer_in_backward(
            torch.optim.SGD, [nn.Parameter(torch.ones(2, 3), requires_grad=False)], {"lr": 1.0}
        )


def test_filter_parts_the_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    apply_optimizer_in_backward(torch.optim.SGD, model[0].parameters(), {"lr": 0.1})
    assert list(dict(in_backward_optimizer_filter(model.named_parameters()))) == ["1.weight", "1.bias"]
    assert list(dict(in_backward_optimizer_filter(model.named_parameters(), include=True))) == [
        "0.weight",
        "0.bias",
    ]
