"""Registered optimizers, and a kernel with one of its own, keep what the conformance kit asks; wrong ones are told."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
from tests.plugins.built_in import built_in
from tests.plugins.conformance import own_optimizer
from tests.plugins.conformance.mistakes.test_mutants import failure_of

from shardwright.contracts import Optimizer
from shardwright.host import host
from shardwright.optim import fused
from shardwright.planning.tables.optimizers import OptimizerSpec
from shardwright_testing import ComputeKernelTests, OptimizerTests

OTHERS: Mapping[str, Mapping[str, Any]] = {
    "adagrad": {"weight_decay": 0.1, "initial_accumulator_value": 0.5},
    "adam": {"weight_decay": 0.1, "beta1": 0.5},
    "adamw": {"weight_decay": 0.1},
    "ftrl": {"l1": 0.01, "l2": 0.1},
    "lamb": {"weight_decay": 0.1},
    "lars": {"weight_decay": 0.1, "eta": 0.5},
    "partial_row_wise_adam": {"weight_decay": 0.1},
    "partial_row_wise_lamb": {"weight_decay": 0.1},
    "row_wise_adagrad": {"weight_decay": 0.1, "weight_decay_mode": "decoupled"},
    "sgd": {"momentum": 0.9, "weight_decay": 0.1},
}
# Each kernel compiles an optimizer: one of each kind of state is in every run.
QUICK = ("ftrl",)  # the others take as long each


def optimizers() -> list[Any]:
    return [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow, id=name)
        for name in built_in("optimizers")
    ]


class _Declared(Optimizer):
    """Right, and the base of the wrong ones."""

    name = "declared"

    def numbers(self, parameters: Mapping[str, Any], learning_rate: float, step: float) -> tuple[float, ...]:
        return (learning_rate,)

    @staticmethod
    def update(xp: Any, weight: Any, gradient: Any, states: Any, row: Any, numbers: Any) -> Any:
        return weight - numbers[0] * gradient, states


class RowStateWithoutRow(_Declared):
    name, states = "row_state_without_row", {"sum": "row"}


class StateOfTables(_Declared):
    name, states = "state_of_tables", {"count": "table"}


class MoreNumbersLater(_Declared):
    name = "more_numbers_later"

    def numbers(self, parameters: Mapping[str, Any], learning_rate: float, step: float) -> tuple[float, ...]:
        return (learning_rate,) * int(min(step, 2))


class LooksAtOtherRows(_Declared):
    name = "looks_at_other_rows"

    @staticmethod
    def update(xp: Any, weight: Any, gradient: Any, states: Any, row: Any, numbers: Any) -> Any:
        return weight - numbers[0] * gradient.mean(), states


class DividesByZero(_Declared):
    name = "divides_by_zero"

    @staticmethod
    def update(xp: Any, weight: Any, gradient: Any, states: Any, row: Any, numbers: Any) -> Any:
        return weight - numbers[0] * gradient / xp.abs(gradient), states


@pytest.mark.parametrize(
    ("wrong", "test", "text"),
    [
        (RowStateWithoutRow, "test_declarations_can_be_planned_with", "reads_row must say of what"),
        (StateOfTables, "test_declarations_can_be_planned_with", "of an element or a row, not 'table'"),
        (MoreNumbersLater, "test_numbers_are_finite_and_always_as_many", r"numbers\(\) differ in length"),
        (LooksAtOtherRows, "test_rows_are_updated_each_by_itself", "not close"),
        (DividesByZero, "test_zero_rows_stay_finite", r"with the gradient 0.0 become \[\[nan"),
    ],
)
def test_wrong_optimizer_fails_and_is_told_so(wrong: type[Optimizer], test: str, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        getattr(OptimizerTests(), test)(wrong())
    getattr(OptimizerTests(), test)(_Declared())


class TestOptimizers(OptimizerTests):
    @pytest.fixture(params=optimizers())
    def optimizer(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Optimizer:
        monkeypatch.setattr(OptimizerTests, "parameters", ({}, OTHERS.get(request.param, {})))
        return host().optimizers.create(request.param)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_REGISTERED", dict(fused._REGISTERED))
    own_optimizer.register()


class TestOwnOptimizer(ComputeKernelTests):
    optimizers = (own_optimizer.NAME, OptimizerSpec(own_optimizer.NAME, parameters={"beta": 0.3}))

    @pytest.fixture
    def compute_kernel(self) -> own_optimizer.OwnOptimizer:
        return own_optimizer.OwnOptimizer()


@pytest.mark.parametrize(
    ("kernel", "test", "text"),
    [
        (
            own_optimizer.ForgetsMomentum,
            "test_backward_updates_rows_or_shows_their_gradients",
            r"touched_momentum, step 1 .* weights of block 0 after the update",
        ),
        (
            own_optimizer.NamesItOtherwise,
            "test_optimizer_state_is_of_the_rows_and_continues_in_another_lookup",
            r"the optimizer state has \['velocity'\]; without sharding it has \['momentum'\]",
        ),
    ],
)
def test_wrong_kernel_of_its_own_optimizer_fails_and_is_told_so(
    monkeypatch: pytest.MonkeyPatch, kernel: type, test: str, text: str
) -> None:
    monkeypatch.setattr(ComputeKernelTests, "optimizers", (own_optimizer.NAME,))
    failure = failure_of("ComputeKernelTests", test, kernel())
    assert re.search(text, failure, re.DOTALL), failure


def test_kernel_whose_optimizer_nobody_registered_is_told_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ComputeKernelTests, "optimizers", (own_optimizer.NAME,))
    monkeypatch.setattr(fused, "_REGISTERED", {})
    test = "test_backward_updates_rows_or_shows_their_gradients"
    failure = failure_of("ComputeKernelTests", test, own_optimizer.OwnOptimizer())
    assert "no unsharded optimizer for 'touched_momentum'" in failure
    assert "register_fused_optimizer(unsharded=...)" in failure
