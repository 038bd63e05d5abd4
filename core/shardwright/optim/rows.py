"""Optimizers of embedding tables that update only the rows a batch used, as the fused kernels do.

They define, without sharding, what ``row_wise_adagrad`` and ``adam`` mean. State and arithmetic are float32
whatever the table's type.

Legend: R rows, D columns, N rows touched in a step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwright.arguments import brief, checked
from shardwright.errors import InvalidInputError

__all__ = ["LazyAdam", "RowWiseAdagrad", "touched_rows"]


def touched_rows(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that a gradient touches, each once, and their gradients.

    A sparse gradient touches the rows it lists, even where the values are zero. A dense one does not tell
    which rows were looked up: there a row counts as touched if any of its values is not zero.

    Args:
        gradient: ``[R, D]``, dense or sparse (duplicate rows are summed).

    Returns:
        The rows ``[N]`` int64, ascending, and their gradients ``[N, D]`` float32.
    """
    if gradient.is_sparse:
        gradient = gradient.float().coalesce()
        return gradient.indices()[0], gradient.values()
    rows = gradient.ne(0).any(dim=1).nonzero().squeeze(1)
    return rows, gradient[rows].float()


class RowOptimizer(Optimizer, ABC):
    """The loop over groups and parameters; what happens to the touched rows is the subclass's.

    Args:
        params: tables, ``[R, D]``, or groups of them.
        defaults: the hyperparameters; numbers must not be negative.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        for name, value in defaults.items():
            if isinstance(value, float | int) and not 0 <= value < math.inf:
                must = "be finite" if value == math.inf else "not be negative"
                raise InvalidInputError(f"{type(self).__name__}: {name} must {must}, got {value}")
        try:
            super().__init__(params, defaults)
        except InvalidInputError:
            raise
        except (TypeError, ValueError, LookupError) as error:
            raise InvalidInputError(
                f"{type(self).__name__}: params must be tables, or groups of them, got {brief(params)}: {error}"
            ) from error

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of tables.

        Raises:
            InvalidInputError: a parameter is no table: it has not two dimensions.
        """
        super().add_param_group(param_group)
        for param in param_group["params"]:
            if param.dim() != 2:
                raise InvalidInputError(
                    f"{type(self).__name__} updates rows of tables, [rows, columns]; "
                    f"got a parameter of shape {list(param.shape)}"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the touched rows of every table that has a gradient.

        Args:
            closure: computes the loss and the gradients again.

        Returns:
            The closure's loss, if there is one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        assert param.grad is not None
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0)
            state.update(self._initial_state(param, group))
        state["step"] += 1
        index, gradient = touched_rows(param.grad)
        rows = self._updated_rows(param[index].float(), gradient, index, state, group)
        param.index_copy_(0, index, rows.to(param.dtype))

    @abstractmethod
    def _initial_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state of a table before its first step."""

    @abstractmethod
    def _updated_rows(
        self, rows: Tensor, gradient: Tensor, index: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> Tensor:
        """The new values of the rows at ``index``; updates their state in place."""


@final
class RowWiseAdagrad(RowOptimizer):
    """Adagrad with one accumulator a row: FBGEMM's exact row-wise Adagrad.

    With ``g`` the gradient of a row (duplicates in the batch summed first), ``sum += mean(g ** 2)`` over the
    columns, then ``row -= lr * g / (sqrt(sum) + eps)``. Against Adagrad it saves all but one column of state.

    Weight decay is the L2 kind, on touched rows: ``g + weight_decay * row`` in place of ``g``.

    Args:
        params: tables, ``[R, D]``, or groups of them.
        lr: learning rate.
        eps: added to the root of the accumulator.
        weight_decay: L2 penalty.
        initial_accumulator_value: initial value of the accumulators.

    Raises:
        InvalidInputError: a number is negative, or a parameter is no table.

    Example:
        >>> import shardwright as sw
        >>> weight = torch.nn.Parameter(torch.zeros(3, 2))
        >>> optimizer = sw.RowWiseAdagrad([weight], lr=0.1)
        >>> weight[0].sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([[-0.1000, -0.1000],
                [ 0.0000,  0.0000],
                [ 0.0000,  0.0000]])
    """

    @checked
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
    ) -> None:
        hyperparameters = {
            "lr": lr,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
        }
        super().__init__(params, hyperparameters)

    def _initial_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        start = group["initial_accumulator_value"]
        return {"sum": param.new_full((param.shape[0], 1), start, dtype=torch.float32)}

    def _updated_rows(
        self, rows: Tensor, gradient: Tensor, index: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> Tensor:
        gradient = gradient + group["weight_decay"] * rows
        sums = state["sum"][index] + gradient.square().mean(dim=1, keepdim=True)
        state["sum"][index] = sums
        return rows - group["lr"] * gradient / (sums.sqrt() + group["eps"])


@final
class LazyAdam(RowOptimizer):
    """Adam that leaves rows alone in steps that do not touch them: FBGEMM's Adam.

    ``torch.optim.Adam`` decays the moments of every row in each step, and moves it. Here a row's moments
    decay when it is touched; the bias correction counts the table's steps. ``torch.optim.SparseAdam`` does
    the same, but adds ``eps`` before the bias correction; here it is added after, as in ``torch.optim.Adam``
    and FBGEMM.

    Weight decay is decoupled, on touched rows: they lose ``lr * weight_decay * row`` besides.

    Args:
        params: tables, ``[R, D]``, or groups of them.
        lr: learning rate.
        betas: decay of the first and of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.

    Raises:
        InvalidInputError: a number is negative, a beta is not in [0, 1), or a parameter is no table.

    Example:
        >>> import shardwright as sw
        >>> weight = torch.nn.Parameter(torch.zeros(3, 2))
        >>> optimizer = sw.LazyAdam([weight], lr=0.1)
        >>> weight[0].sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([[-0.1000, -0.1000],
                [ 0.0000,  0.0000],
                [ 0.0000,  0.0000]])
    """

    @checked
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise InvalidInputError(f"LazyAdam: betas must be in [0, 1), got {betas}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _initial_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {name: torch.zeros_like(param, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}

    def _updated_rows(
        self, rows: Tensor, gradient: Tensor, index: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> Tensor:
        beta1, beta2 = group["betas"]
        step = float(state["step"])
        first = state["exp_avg"][index].lerp(gradient, 1 - beta1)
        second = state["exp_avg_sq"][index].lerp(gradient.square(), 1 - beta2)
        state["exp_avg"][index], state["exp_avg_sq"][index] = first, second
        root = (second / (1 - beta2**step)).sqrt() + group["eps"]
        direction = first / (1 - beta1**step) / root + group["weight_decay"] * rows
        return rows - group["lr"] * direction
