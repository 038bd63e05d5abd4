"""Optimizers whose step is scaled by the norm of the row that it changes: LARS and LAMB, a row in a layer's place.

A row without a norm, or whose step has none, takes the step unscaled, as the papers' implementations do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from shardwright.contracts import Optimizer
from shardwright_plugins.optimizers.adam import PARAMETERS, moments


class Lars(Optimizer):
    """Momentum with ``lr * eta * |w| / (|g| + weight_decay * |w|)`` for its rate (You et al. 2017), as ``LARS_SGD``."""

    name: ClassVar[str] = "lars"
    parameters: ClassVar[Mapping[str, Any]] = {"momentum": 0.9, "eta": 0.001, "weight_decay": 0.0}
    states: ClassVar[Mapping[str, str]] = {"momentum_buffer": "element"}
    reads_row: ClassVar[str] = "weights"

    def numbers(self, parameters: Mapping[str, Any], learning_rate: float, step: float) -> tuple[float, ...]:  # noqa: D102
        return (
            learning_rate,
            float(parameters["momentum"]),
            float(parameters["eta"]),
            float(parameters["weight_decay"]),
        )

    @staticmethod
    def row_terms(xp: Any, weight: Any, gradient: Any, states: Any, numbers: Any) -> Any:  # noqa: D102
        return weight * weight, gradient * gradient

    @staticmethod
    def row_update(xp: Any, states: Any, means: Any, numbers: Any) -> Any:  # noqa: D102
        rate, _, eta, decay = numbers
        # Norms of means of squares: the number of columns is in both, and cancels.
        weights, gradients = xp.sqrt(means[0]), xp.sqrt(means[1])
        bottom = gradients + decay * weights
        has_norms = (weights > 0) & (bottom > 0)
        scale = xp.where(has_norms, eta * weights / xp.where(has_norms, bottom, 1.0), 1.0)
        return states, (rate * scale,)

    @staticmethod
    def update(xp: Any, weight: Any, gradient: Any, states: Any, row: Any, numbers: Any) -> Any:  # noqa: D102
        buffer = numbers[1] * states[0] + row[0] * (gradient + numbers[3] * weight)
        return weight - buffer, (buffer,)


class Lamb(Optimizer):
    """Adam's step ``r``, with decoupled weight decay, times ``|w| / |r|`` of the row (You et al. 2020), as ``LAMB``."""

    name: ClassVar[str] = "lamb"
    parameters: ClassVar[Mapping[str, Any]] = {
        name: value for name, value in PARAMETERS.items() if name != "weight_decay_mode"
    }
    states: ClassVar[Mapping[str, str]] = {"exp_avg": "element", "exp_avg_sq": "element"}
    reads_row: ClassVar[str] = "weights"

    def numbers(self, parameters: Mapping[str, Any], learning_rate: float, step: float) -> tuple[float, ...]:  # noqa: D102
        new1, new2, bias1, bias2 = moments(parameters, step)
        return (
            learning_rate,
            float(parameters["eps"]),
            *(new1, new2, 1 / bias1, 1 / bias2),
            float(parameters["weight_decay"]),
        )

    @staticmethod
    def row_terms(xp: Any, weight: Any, gradient: Any, states: Any, numbers: Any) -> Any:  # noqa: D102
        _, eps, new1, new2, corrected1, corrected2, decay = numbers
        average = states[0] + new1 * (gradient - states[0])
        square = states[1] + new2 * (gradient * gradient - states[1])
        step = average * corrected1 / (xp.sqrt(square * corrected2) + eps) + decay * weight
        return weight * weight, step * step

    @staticmethod
    def row_update(xp: Any, states: Any, means: Any, numbers: Any) -> Any:  # noqa: D102
        has_norms = (means[0] > 0) & (means[1] > 0)
        ratio = xp.sqrt(means[0] / xp.where(has_norms, means[1], 1.0))
        return states, (numbers[0] * xp.where(has_norms, ratio, 1.0),)

    @staticmethod
    def update(xp: Any, weight: Any, gradient: Any, states: Any, row: Any, numbers: Any) -> Any:  # noqa: D102
        _, eps, new1, new2, corrected1, corrected2, decay = numbers
        average = states[0] + new1 * (gradient - states[0])
        square = states[1] + new2 * (gradient * gradient - states[1])
        step = average * corrected1 / (xp.sqrt(square * corrected2) + eps) + decay * weight
        return weight - row[0] * step, (average, square)


class PartialRowWiseLamb(Lamb):
    """LAMB with one second moment a row, that of the row's mean square, as FBGEMM's ``PARTIAL_ROWWISE_LAMB``.

    The step is ``r = s * m + decay * w`` with one ``s`` a row, so that its norm follows from means of products.
    """

    name: ClassVar[str] = "partial_row_wise_lamb"
    states: ClassVar[Mapping[str, str]] = {"exp_avg": "element", "exp_avg_sq": "row"}

    @staticmethod
    def row_terms(xp: Any, weight: Any, gradient: Any, states: Any, numbers: Any) -> Any:  # noqa: D102
        average = states[0] + numbers[2] * (gradient - states[0])
        return weight * weight, gradient * gradient, average * average, average * weight

    @staticmethod
    def row_update(xp: Any, states: Any, means: Any, numbers: Any) -> Any:  # noqa: D102
        rate, eps, _, new2, corrected1, corrected2, decay = numbers
        square = states[0] + new2 * (means[1] - states[0])
        scale = corrected1 / (xp.sqrt(square * corrected2) + eps)
        # |s m + decay w|^2, which rounding may bring below 0.
        step = xp.maximum(
            scale * scale * means[2] + 2.0 * scale * decay * means[3] + decay * decay * means[0], 0.0
        )
        has_norms = (means[0] > 0) & (step > 0)
        ratio = xp.sqrt(means[0] / xp.where(has_norms, step, 1.0))
        return (square,), (rate * xp.where(has_norms, ratio, 1.0), scale)

    @staticmethod
    def update(xp: Any, weight: Any, gradient: Any, states: Any, row: Any, numbers: Any) -> Any:  # noqa: D102
        average = states[0] + numbers[2] * (gradient - states[0])
        return weight - row[0] * (row[1] * average + numbers[6] * weight), (average,)
