"""The optimizers of the ``fused_torch`` kernel: updates of the rows that got a gradient.

Each is the torch optimizer of its name for a gradient that is zero in all other rows; ``adam`` leaves those rows
alone, as FBGEMM's ADAM and ``torch.optim.SparseAdam`` do (Kingma & Ba 2014; Duchi et al. 2011 for ``adagrad``;
``row_wise_adagrad`` keeps one mean square a row: Naumov et al. 2019, "Deep Learning Recommendation Model").
State is float32. Legend: R rows, U updated rows, D columns held, C columns of the gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from shardwright.planning.tables.optimizers import OptimizerSpec

_EPS = 1e-8  # FBGEMM's default


class RowUpdate(ABC):
    """The state of one optimizer for ``[R, D]`` weights, and its step on some of the rows.

    Args:
        spec: optimizer and its parameters.
        state: float32 state of the rows, ``[R, D]`` or ``[R, 1]``, under the names in ``states``; changed in place.
    """

    states: ClassVar[tuple[str, ...]] = ()
    """The torch optimizer's names of the state."""
    states_per_row: ClassVar[frozenset[str]] = frozenset()
    """Those that have one value a row."""

    def __init__(self, spec: OptimizerSpec, state: Mapping[str, Tensor]) -> None:
        self._spec, self._state = spec, state

    @abstractmethod
    def step(self, rows: Tensor, gradient: Tensor, own: slice, learning_rate: float, number: float) -> Tensor:
        """Advance the state of ``rows`` and return what to subtract from their weights.

        Args:
            rows: distinct row numbers, ``[U]``.
            gradient: gradient of each row, ``[U, C]`` float32.
            own: the columns of ``gradient`` that are the weights' own.
            learning_rate: learning rate of this step.
            number: number of this step, from 1.

        Returns:
            ``[U, D]`` float32.
        """

    @classmethod
    def columns(cls, num_columns: int) -> Mapping[str, int]:
        """Columns of each state, for weights of ``num_columns`` columns."""
        return {name: 1 if name in cls.states_per_row else num_columns for name in cls.states}


class Sgd(RowUpdate):
    """``w -= lr * g``."""

    def step(self, rows: Tensor, gradient: Tensor, own: slice, learning_rate: float, number: float) -> Tensor:
        return gradient[:, own] * learning_rate


class Adagrad(RowUpdate):
    """``sum += g^2; w -= lr * g / (sqrt(sum) + eps)``, element by element."""

    states: ClassVar[tuple[str, ...]] = ("sum",)

    def __init__(self, spec: OptimizerSpec, state: Mapping[str, Tensor]) -> None:
        super().__init__(spec, state)
        self._eps, self._sum = spec.get("eps", _EPS), state["sum"]

    def step(self, rows: Tensor, gradient: Tensor, own: slice, learning_rate: float, number: float) -> Tensor:
        gradient = gradient[:, own]
        total = self._sum[rows].addcmul_(gradient, gradient)
        self._sum[rows] = total
        return gradient.div(total.sqrt_().add_(self._eps)).mul_(learning_rate)


class RowWiseAdagrad(RowUpdate):
    """``sum += mean over all columns of g^2; w -= lr * g / (sqrt(sum) + eps)``, one sum a row."""

    states: ClassVar[tuple[str, ...]] = ("sum",)
    states_per_row: ClassVar[frozenset[str]] = frozenset({"sum"})

    def __init__(self, spec: OptimizerSpec, state: Mapping[str, Tensor]) -> None:
        super().__init__(spec, state)
        self._eps, self._sum = spec.get("eps", _EPS), state["sum"]

    def step(self, rows: Tensor, gradient: Tensor, own: slice, learning_rate: float, number: float) -> Tensor:
        total = self._sum[rows] + gradient.square().mean(1, keepdim=True)
        self._sum[rows] = total
        return gradient[:, own] * (learning_rate / (total.sqrt_() + self._eps))


class Adam(RowUpdate):
    """Adam with bias correction by the number of steps, applied to rows with a gradient only."""

    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __init__(self, spec: OptimizerSpec, state: Mapping[str, Tensor]) -> None:
        super().__init__(spec, state)
        self._eps = spec.get("eps", _EPS)
        self._beta1, self._beta2 = spec.get("beta1", 0.9), spec.get("beta2", 0.999)
        self._average, self._square = state["exp_avg"], state["exp_avg_sq"]

    def step(self, rows: Tensor, gradient: Tensor, own: slice, learning_rate: float, number: float) -> Tensor:
        gradient = gradient[:, own]
        average = self._average[rows].lerp_(gradient, 1 - self._beta1)
        square = self._square[rows].mul_(self._beta2).addcmul_(gradient, gradient, value=1 - self._beta2)
        self._average[rows], self._square[rows] = average, square
        denominator = (square / (1 - self._beta2**number)).sqrt_().add_(self._eps)
        return average.div(denominator).mul_(learning_rate / (1 - self._beta1**number))


ROW_UPDATES: Mapping[str, type[RowUpdate]] = {
    "sgd": Sgd,
    "adagrad": Adagrad,
    "row_wise_adagrad": RowWiseAdagrad,
    "adam": Adam,
}
