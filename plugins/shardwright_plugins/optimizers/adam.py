"""Adam (Kingma & Ba 2014) of the rows that got a gradient, bias corrected by the number of the table's updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from shardwright.contracts import Optimizer
from shardwright_plugins.optimizers._decay import DECOUPLED, L2, decay_refusal, decays, has_l2

PARAMETERS: Mapping[str, Any] = {
    "eps": 1e-8,
    "beta1": 0.9,
    "beta2": 0.999,
    "weight_decay": 0.0,
    "weight_decay_mode": L2,
}
"""FBGEMM's and torch's defaults."""


def moments(parameters: Mapping[str, Any], step: float) -> tuple[float, ...]:
    """Find the numbers of both moments: weights of the new values, and bias corrections ``1 - beta^step``."""
    beta1, beta2 = float(parameters["beta1"]), float(parameters["beta2"])
    return 1 - beta1, 1 - beta2, 1 - beta1**step, 1 - beta2**step


class _Moments(Optimizer):
    """An Adam with weight decay: rate and epsilon, numbers of both moments, and those of the decay."""

    def refusal(self, parameters: Mapping[str, Any]) -> str:
        return decay_refusal(parameters)

    def numbers(self, parameters: Mapping[str, Any], learning_rate: float, step: float) -> tuple[float, ...]:
        new1, new2, bias1, bias2 = moments(parameters, step)
        return (
            learning_rate / bias1,
            float(parameters["eps"]),
            *(new1, new2, 1 / bias2),
            *decays(parameters, learning_rate),
        )


class Adam(_Moments):
    """``m += (1 - beta1) (g - m); v += (1 - beta2) (g^2 - v)``; as ``torch.optim.Adam``, weight decay as L2 penalty."""

    name: ClassVar[str] = "adam"
    parameters: ClassVar[Mapping[str, Any]] = PARAMETERS
    states: ClassVar[Mapping[str, str]] = {"exp_avg": "element", "exp_avg_sq": "element"}

    @staticmethod
    def update(xp: Any, weight: Any, gradient: Any, states: Any, row: Any, numbers: Any) -> Any:  # noqa: D102
        rate, eps, new1, new2, corrected, penalty, left = numbers
        whole = gradient + penalty * weight
        average = states[0] + new1 * (whole - states[0])
        square = states[1] + new2 * (whole * whole - states[1])
        return left * weight - rate * average / (xp.sqrt(square * corrected) + eps), (average, square)


class AdamW(Adam):
    """Adam with decoupled weight decay, as ``torch.optim.AdamW`` (Loshchilov & Hutter 2019) and FBGEMM's ``ADAM``."""

    name: ClassVar[str] = "adamw"
    parameters: ClassVar[Mapping[str, Any]] = {**PARAMETERS, "weight_decay_mode": DECOUPLED}


class PartialRowWiseAdam(_Moments):
    """Adam with one second moment a row, that of the row's mean square, as FBGEMM's ``PARTIAL_ROWWISE_ADAM``."""

    name: ClassVar[str] = "partial_row_wise_adam"
    parameters: ClassVar[Mapping[str, Any]] = {**PARAMETERS, "weight_decay_mode": DECOUPLED}
    states: ClassVar[Mapping[str, str]] = {"exp_avg": "element", "exp_avg_sq": "row"}
    reads_row: ClassVar[str] = "gradients"

    def variant(self, parameters: Mapping[str, Any]) -> Optimizer:
        """With an L2 penalty gradients depend on the row's weights."""
        return _PenalisedPartialRowWiseAdam() if has_l2(parameters) else self

    @staticmethod
    def row_terms(xp: Any, weight: Any, gradient: Any, states: Any, numbers: Any) -> Any:  # noqa: D102
        whole = gradient + numbers[5] * weight
        return (whole * whole,)

    @staticmethod
    def row_update(xp: Any, states: Any, means: Any, numbers: Any) -> Any:  # noqa: D102
        square = states[0] + numbers[3] * (means[0] - states[0])
        return (square,), (numbers[0] / (xp.sqrt(square * numbers[4]) + numbers[1]),)

    @staticmethod
    def update(xp: Any, weight: Any, gradient: Any, states: Any, row: Any, numbers: Any) -> Any:  # noqa: D102
        average = states[0] + numbers[2] * (gradient + numbers[5] * weight - states[0])
        return numbers[6] * weight - row[0] * average, (average,)


class _PenalisedPartialRowWiseAdam(PartialRowWiseAdam):
    """The same, with the weights of whole rows."""

    reads_row: ClassVar[str] = "weights"
