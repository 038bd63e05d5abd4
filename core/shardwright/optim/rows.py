"""The base of torch optimizers that update only the rows of tables which a batch used, as the fused kernels do.

State and arithmetic are float32 whatever the table's type.

Legend: R rows, D columns, N rows touched in a step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwright.arguments import brief
from shardwright.errors import InvalidInputError


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
