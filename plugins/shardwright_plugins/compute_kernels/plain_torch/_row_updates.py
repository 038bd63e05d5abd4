"""The built-in optimizers of the ``fused_torch`` kernel: updates of rows with torch's fused operations."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from shardwright.planning.tables.optimizers import OptimizerSpec

_EPS = 1e-8  # FBGEMM's default


def row_update(
    spec: OptimizerSpec,
    state: Mapping[str, Tensor],
    rows: Tensor,
    gradient: Tensor,
    own: slice,
    rate: float,
    number: float,
) -> Tensor:
    """Advance the state of some of R rows, and return what to subtract from their weights: ``[U, D]`` float32.

    Each is the torch optimizer of its name for a gradient that is zero in all other rows; ``adam`` leaves those rows
    alone, as FBGEMM's ADAM and ``torch.optim.SparseAdam`` do (Kingma & Ba 2014; Duchi et al. 2011 for ``adagrad``;
    ``row_wise_adagrad`` keeps one mean square a row: Naumov et al. 2019, "Deep Learning Recommendation Model").

    Args:
        spec: optimizer (``sgd``, ``adagrad``, ``row_wise_adagrad`` or ``adam``) and its parameters.
        state: float32 state of all rows, ``[R, D]`` or ``[R, 1]``, by the torch optimizer's names; changed in place.
        rows: distinct row numbers, ``[U]``.
        gradient: gradient of each row, ``[U, C]`` float32.
        own: the D columns of ``gradient`` that are the weights' own.
        rate: learning rate of this step.
        number: number of this step, from 1.
    """
    eps = spec.get("eps", _EPS)
    if spec.name == "row_wise_adagrad":
        mean = state["sum"][rows] + gradient.square().mean(1, keepdim=True)
        state["sum"][rows] = mean
        return gradient[:, own] * (rate / (mean.sqrt_() + eps))
    gradient = gradient[:, own]
    if spec.name == "sgd":
        return gradient * rate
    if spec.name == "adagrad":
        total = state["sum"][rows].addcmul_(gradient, gradient)
        state["sum"][rows] = total
        return gradient.div(total.sqrt_().add_(eps)).mul_(rate)
    beta1, beta2 = spec.get("beta1", 0.9), spec.get("beta2", 0.999)
    average = state["exp_avg"][rows].lerp_(gradient, 1 - beta1)
    square = state["exp_avg_sq"][rows].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    state["exp_avg"][rows], state["exp_avg_sq"][rows] = average, square
    denominator = (square / (1 - beta2**number)).sqrt_().add_(eps)
    return average.div(denominator).mul_(rate / (1 - beta1**number))
