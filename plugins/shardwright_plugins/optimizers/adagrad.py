"""Adagrad (Duchi et al. 2011), with an accumulator for each element or for each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from shardwright.contracts import Optimizer
from shardwright_plugins.optimizers._decay import L2, decay_refusal, decays, has_l2


class _Accumulating(Optimizer):
    """Parameters of Adagrad."""

    parameters: ClassVar[Mapping[str, Any]] = {
        "eps": 1e-8,  # FBGEMM's default
        "initial_accumulator_value": 0.0,
        "weight_decay": 0.0,
        "weight_decay_mode": L2,
    }

    def refusal(self, parameters: Mapping[str, Any]) -> str:
        return decay_refusal(parameters)

    def initial(self, parameters: Mapping[str, Any]) -> Mapping[str, float]:
        return {"sum": float(parameters["initial_accumulator_value"])}

    def numbers(self, parameters: Mapping[str, Any], learning_rate: float, step: float) -> tuple[float, ...]:
        return (learning_rate, float(parameters["eps"]), *decays(parameters, learning_rate))


class Adagrad(_Accumulating):
    """``sum += g^2; w -= lr * g / (sqrt(sum) + eps)``, element by element, as ``torch.optim.Adagrad``."""

    name: ClassVar[str] = "adagrad"
    states: ClassVar[Mapping[str, str]] = {"sum": "element"}

    @staticmethod
    def update(xp: Any, weight: Any, gradient: Any, states: Any, row: Any, numbers: Any) -> Any:  # noqa: D102
        rate, eps, penalty, left = numbers
        whole = gradient + penalty * weight
        total = states[0] + whole * whole
        return left * weight - rate * whole / (xp.sqrt(total) + eps), (total,)


class RowWiseAdagrad(_Accumulating):
    """``sum += mean over the row of g^2``, one sum a row (Naumov et al. 2019, "Deep Learning Recommendation Model")."""

    name: ClassVar[str] = "row_wise_adagrad"
    states: ClassVar[Mapping[str, str]] = {"sum": "row"}
    reads_row: ClassVar[str] = "gradients"

    def variant(self, parameters: Mapping[str, Any]) -> Optimizer:
        """With an L2 penalty gradients depend on the row's weights."""
        return _PenalisedRowWiseAdagrad() if has_l2(parameters) else self

    @staticmethod
    def row_terms(xp: Any, weight: Any, gradient: Any, states: Any, numbers: Any) -> Any:  # noqa: D102
        whole = gradient + numbers[2] * weight
        return (whole * whole,)

    @staticmethod
    def row_update(xp: Any, states: Any, means: Any, numbers: Any) -> Any:  # noqa: D102
        total = states[0] + means[0]
        return (total,), (numbers[0] / (xp.sqrt(total) + numbers[1]),)

    @staticmethod
    def update(xp: Any, weight: Any, gradient: Any, states: Any, row: Any, numbers: Any) -> Any:  # noqa: D102
        return numbers[3] * weight - row[0] * (gradient + numbers[2] * weight), states


class _PenalisedRowWiseAdagrad(RowWiseAdagrad):
    """The same, with the weights of whole rows."""

    reads_row: ClassVar[str] = "weights"
