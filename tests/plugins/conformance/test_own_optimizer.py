"""Kernels whose optimizers are their own, tested against what `register_fused_optimizer(unsharded=...)` builds."""

from __future__ import annotations

import re

import pytest
from tests.plugins.conformance import own_optimizer
from tests.plugins.conformance.mistakes.test_mutants import failure_of

from shardwright.optim import fused
from shardwright.planning.tables.optimizers import OptimizerSpec
from shardwright_testing import ComputeKernelTests


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
