"""Stochastic gradient descent, with momentum if asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from shardwright.contracts import Optimizer
from shardwright_plugins.optimizers._decay import L2, decay_refusal, decays


class _Descent(Optimizer):
    """Parameters of gradient descent."""

    parameters: ClassVar[Mapping[str, Any]] = {
        "momentum": 0.0,
        "weight_decay": 0.0,
        "weight_decay_mode": L2,
    }

    def refusal(self, parameters: Mapping[str, Any]) -> str:
        return decay_refusal(parameters)

    def numbers(self, parameters: Mapping[str, Any], learning_rate: float, step: float) -> tuple[float, ...]:
        return (learning_rate, float(parameters["momentum"]), *decays(parameters, learning_rate))


class Sgd(_Descent):
    """``w -= lr * g``, as ``torch.optim.SGD``."""

    name: ClassVar[str] = "sgd"

    def variant(self, parameters: Mapping[str, Any]) -> Optimizer:
        """Momentum needs memory, which there is only with it."""
        return SgdWithMomentum() if parameters["momentum"] else self

    @staticmethod
    def update(xp: Any, weight: Any, gradient: Any, states: Any, row: Any, numbers: Any) -> Any:  # noqa: D102
        rate, _, penalty, left = numbers
        return left * weight - rate * (gradient + penalty * weight), states


class SgdWithMomentum(_Descent):
    """``b = momentum * b + g; w -= lr * b``, as ``torch.optim.SGD`` without dampening (Polyak 1964)."""

    name: ClassVar[str] = "sgd"
    states: ClassVar[Mapping[str, str]] = {"momentum_buffer": "element"}

    @staticmethod
    def update(xp: Any, weight: Any, gradient: Any, states: Any, row: Any, numbers: Any) -> Any:  # noqa: D102
        rate, momentum, penalty, left = numbers
        buffer = momentum * states[0] + gradient + penalty * weight
        return left * weight - rate * buffer, (buffer,)
