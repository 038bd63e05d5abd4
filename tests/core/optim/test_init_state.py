"""`KeyedOptimizer.init_state`: state before the first step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwright import CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper


def keyed(kind: Any, **settings: Any) -> tuple[nn.Parameter, KeyedOptimizerWrapper]:
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    return weight, KeyedOptimizerWrapper({"weight": weight}, lambda params: kind(params, lr=0.1, **settings))


def test_state_is_there_and_nothing_else_changed() -> None:
    weight, optimizer = keyed(torch.optim.Adam, weight_decay=0.5)
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


def test_state_that_is_there_stays() -> None:
    weight, optimizer = keyed(torch.optim.Adam)
    weight.grad = torch.ones(2)
    optimizer.step()
    before = {name: value.clone() for name, value in optimizer.state_dict()["state"]["weight"].items()}
    at = weight.tolist()
    optimizer.init_state()
    assert weight.tolist() == at
    for name, value in optimizer.state_dict()["state"]["weight"].items():
        assert torch.equal(value, before[name])


def test_training_goes_on_as_without() -> None:
    ends = []
    for makes_state in (True, False):
        weight, optimizer = keyed(torch.optim.Adam)
        if makes_state:
            CombinedOptimizer([("one", OptimizerWrapper(optimizer))]).init_state()
        for _ in range(3):
            weight.grad = torch.tensor([0.5, -1.0])
            optimizer.step()
        ends.append(weight.tolist())
    assert ends[0] == ends[1]
