"""Optimizers of torch that fused ones stand for, and what does without sharding the same as these.

`RowWiseAdagrad` and `LazyAdam` define what ``row_wise_adagrad`` and ``adam`` mean: tests compare kernels with them, so
their formulas are written apart from those of the registered optimizers. State and arithmetic are float32 whatever the
table's type.

Legend: R rows, D columns, N rows touched in a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwright.arguments import checked
from shardwright.errors import InvalidInputError, nearest
from shardwright.optim.fused import renaming
from shardwright.optim.rows import RowOptimizer
from shardwright.planning.tables.optimizers import OptimizerSpec

# FBGEMM's defaults (split_table_batched_embeddings_ops_training.py), which differ from torch's.
_EPS = 1e-8
_BETA1, _BETA2 = 0.9, 0.999
_NEUTRAL = ("beta1", "beta2", "eps")


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
        >>> import shardwright as sw, torch
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
        >>> import shardwright as sw, torch
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


def _parameters(spec: OptimizerSpec, **defaults: Any) -> dict[str, Any]:
    # FBGEMM takes the neutral ones for all optimizers, and 0 for what one does not know.
    given = {
        name: value
        for name, value in spec.parameters
        if name in defaults or not (name in _NEUTRAL or not value)
    }
    for name in given:
        if name not in defaults:
            known = ", ".join(["learning_rate", *sorted(defaults)])
            raise InvalidInputError(
                f"optimizer {spec.name!r} has no parameter {name!r}. Known: {known}.{nearest(name, defaults)}"
            )
    return {**defaults, **given}


def _sgd(spec: OptimizerSpec, params: Iterable[Tensor]) -> Optimizer:
    return torch.optim.SGD(params, lr=spec.learning_rate, **_parameters(spec))


def _adagrad(spec: OptimizerSpec, params: Iterable[Tensor]) -> Optimizer:
    return torch.optim.Adagrad(params, lr=spec.learning_rate, **_parameters(spec, eps=_EPS))


def _adam(spec: OptimizerSpec, params: Iterable[Tensor]) -> Optimizer:
    parameters = _parameters(spec, eps=_EPS, beta1=_BETA1, beta2=_BETA2)
    betas = (parameters["beta1"], parameters["beta2"])
    return LazyAdam(params, lr=spec.learning_rate, betas=betas, eps=parameters["eps"])


def _row_wise_adagrad(spec: OptimizerSpec, params: Iterable[Tensor]) -> Optimizer:
    return RowWiseAdagrad(params, lr=spec.learning_rate, **_parameters(spec, eps=_EPS))


# No weight decay and no momentum: torch's are of all rows, touched or not; fused_params have those of touched rows.
_ADAGRAD = renaming({"lr": "learning_rate", "eps": "eps"})
_ADAM = renaming({"lr": "learning_rate", "betas": ("beta1", "beta2"), "eps": "eps"})
_FUSED = (
    (torch.optim.SGD, "sgd", renaming({"lr": "learning_rate"}), _sgd),
    (torch.optim.Adagrad, "adagrad", _ADAGRAD, _adagrad),
    (RowWiseAdagrad, "row_wise_adagrad", _ADAGRAD, _row_wise_adagrad),
    (torch.optim.Adam, "adam", _ADAM, _adam),
    (LazyAdam, "adam", _ADAM, _adam),
)


def fused() -> Sequence[tuple[Any, ...]]:
    """The optimizers of torch that fused ones stand for, as arguments of `register_fused_optimizer`."""
    return _FUSED
