"""Every registered optimizer keeps what the conformance kit asks, with its defaults and with other parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from shardwright.contracts import Optimizer
from shardwright.host import host
from shardwright.testing import OptimizerTests

OTHERS: Mapping[str, Mapping[str, Any]] = {
    "adagrad": {"weight_decay": 0.1, "initial_accumulator_value": 0.5},
    "adam": {"weight_decay": 0.1, "beta1": 0.5},
    "adamw": {"weight_decay": 0.1},
    "ftrl": {"l1": 0.01, "l2": 0.1},
    "lamb": {"weight_decay": 0.1},
    "lars": {"weight_decay": 0.1, "eta": 0.5},
    "partial_row_wise_adam": {"weight_decay": 0.1},
    "row_wise_adagrad": {"weight_decay": 0.1, "weight_decay_mode": "decoupled"},
    "sgd": {"momentum": 0.9, "weight_decay": 0.1},
}
# Each kernel compiles an optimizer: one of each kind of state is in every run.
QUICK = ("ftrl", "lamb", "row_wise_adagrad")


def optimizers() -> list[Any]:
    return [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow, id=name)
        for name in sorted(host().optimizers)
    ]


class TestOptimizers(OptimizerTests):
    @pytest.fixture(params=optimizers())
    def optimizer(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Optimizer:
        monkeypatch.setattr(OptimizerTests, "parameters", ({}, OTHERS.get(request.param, {})))
        return host().optimizers.create(request.param)
