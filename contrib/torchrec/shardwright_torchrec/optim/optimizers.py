"""Optimizers to apply in the backward pass, by TorchRec's names, with its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch.optim import SGD, Adagrad, Adam

import shardwright as sw

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "LarsSGD",
    "PartialRowWiseAdam",
    "PartialRowWiseLAMB",
    "RowWiseAdagrad",
]

_RATE = 0.01
"""Learning rate by default; FBGEMM's number."""
_WITHOUT_EFFECT = frozenset({"params", "initial_lr"})


class _OfRows(torch.optim.Optimizer):
    """An optimizer of shardwright's, which updates the rows that a gradient touches.

    Args:
        params: tables ``[rows, columns]``.
        kwargs: `lr` or `learning_rate`, and the optimizer's parameters under FBGEMM's names or torch's (`betas`).

    Raises:
        InvalidInputError: a parameter is not known.
    """

    rule: ClassVar[str]

    def __init__(self, params: Iterable[torch.nn.Parameter], **kwargs: Any) -> None:
        rate, parameters = _parameters(kwargs)
        self._inner = sw.spec_to_torch(sw.OptimizerSpec(self.rule, rate, parameters), params)
        super().__init__(self._inner.param_groups, {})
        self.state = self._inner.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the rows with a gradient."""
        return self._inner.step(closure)  # type: ignore[arg-type]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict."""
        self._inner.load_state_dict(state_dict)
        self.state, self.param_groups = self._inner.state, self._inner.param_groups


def _parameters(given: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """Learning rate, and parameters by shardwright's names."""
    parameters = {name: value for name, value in given.items() if name not in _WITHOUT_EFFECT}
    if "betas" in parameters:
        parameters["beta1"], parameters["beta2"] = parameters.pop("betas")
    rates = [parameters.pop(name) for name in ("lr", "learning_rate") if name in parameters]
    if len(rates) > 1:
        raise sw.InvalidInputError(f"lr and learning_rate are the same; got both, {rates}")
    return (rates[0] if rates else _RATE), parameters


def _specified(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Parameters of a group, as sharding reads them."""
    rate, parameters = _parameters(group)
    return {"learning_rate": rate, **parameters}


class LAMB(_OfRows):
    """Adam's step scaled by the norm of the row over its own: You and others 2020."""

    rule = "lamb"


class PartialRowWiseLAMB(_OfRows):
    """LAMB with one second moment a row, as FBGEMM's `PARTIAL_ROWWISE_LAMB`."""

    rule = "partial_row_wise_lamb"


class LarsSGD(_OfRows):
    """Momentum with a rate by the norms of the row and its gradient: You and others 2017."""

    rule = "lars"


class PartialRowWiseAdam(_OfRows):
    """Adam with one second moment a row."""

    rule = "partial_row_wise_adam"


class RowWiseAdagrad(sw.RowWiseAdagrad):  # type: ignore[misc]  # final, so that sharding meets no unknown one
    """Adagrad with one accumulator a row; the arguments stand in TorchRec's order.

    Args:
        params: tables ``[rows, columns]``.
        lr: learning rate.
        lr_decay: must be 0.
        weight_decay: L2 penalty.
        initial_accumulator_value: initial value of the accumulators.
        eps: added to the root of the accumulator.
        maximize: must be False.
        beta1: not needed: a script that chooses among optimizers gives it to all.
        beta2: not needed, too.

    Raises:
        UnsupportedError: the rate decays, or values are to grow.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        beta1: float = 0.9,
        beta2: float = 0.999,
    ) -> None:
        if lr_decay or maximize:
            raise sw.UnsupportedError(
                f"RowWiseAdagrad(lr_decay={lr_decay}, maximize={maximize}) is not supported: set the rate with "
                "a torch.optim.lr_scheduler; give the loss with the other sign"
            )
        super().__init__(params, lr, eps, weight_decay, initial_accumulator_value)


def _row_wise_adagrad(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rate and epsilon of a group; nothing else of it can be fused."""
    for name in ("weight_decay", "initial_accumulator_value"):
        if group.get(name):
            raise sw.UnsupportedError(
                f"{name}={group[name]!r} has no fused counterpart; possible are eps, lr"
            )
    return {"learning_rate": group["lr"], "eps": group["eps"]}


sw.register_fused_optimizer(RowWiseAdagrad, "row_wise_adagrad", _row_wise_adagrad)
for _kind in (LAMB, LarsSGD, PartialRowWiseAdam, PartialRowWiseLAMB):
    sw.register_fused_optimizer(_kind, _kind.rule, _specified)
