"""FTRL-Proximal (McMahan et al. 2013, "Ad Click Prediction: a View from the Trenches", algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from shardwright.contracts import Optimizer


class Ftrl(Optimizer):
    """Follow the regularised leader: rare features keep weights of exactly 0 under the L1 penalty.

    The learning rate is the paper's ``alpha``.
    """

    name: ClassVar[str] = "ftrl"
    parameters: ClassVar[Mapping[str, Any]] = {"beta": 1.0, "l1": 0.0, "l2": 0.0}
    states: ClassVar[Mapping[str, str]] = {"z": "element", "n": "element"}

    def numbers(self, parameters: Mapping[str, Any], learning_rate: float, step: float) -> tuple[float, ...]:  # noqa: D102
        return learning_rate, float(parameters["beta"]), float(parameters["l1"]), float(parameters["l2"])

    @staticmethod
    def update(xp: Any, weight: Any, gradient: Any, states: Any, row: Any, numbers: Any) -> Any:  # noqa: D102
        rate, beta, l1, l2 = numbers
        squares = states[1] + gradient * gradient
        # The linear part of all losses so far, with the proximal terms that pull to the weights they had.
        linear = states[0] + gradient - (xp.sqrt(squares) - xp.sqrt(states[1])) / rate * weight
        shrunk = xp.sign(linear) * xp.maximum(xp.abs(linear) - l1, 0.0)
        return -shrunk / ((beta + xp.sqrt(squares)) / rate + l2), (linear, squares)
