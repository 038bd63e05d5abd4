from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright import (
    InvalidInputError,
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)


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
