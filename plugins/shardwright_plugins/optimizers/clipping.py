"""Clipping of gradients of dense parameters and sharded tables: by one norm, the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import InvalidInputError
from shardwright.runtime.sharded.tables.shard_gradients import AppliedGradient, ShardGradient
from shardwright_plugins.optimizers.over_ranks import power_of, share_of, total_of


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients so that their norm over all parameters, of all ranks, is at most ``max_norm``.

    Every rank makes this call, after the backward pass. Replicated parameters count once, and of a sharded table each
    rank adds its part, so that the norm is that of the unsharded model. Tables need ``update="in_step"``, or a compute
    kernel that shows gradients.

    Args:
        parameters: parameters of the model, ``model.parameters()``.
        max_norm: largest norm that gradients are to have.
        norm_type: exponent of the norm, above 0; may be ``math.inf``.
        error_if_nonfinite: raise if the norm is infinite or no number.

    Returns:
        The norm before clipping, the same on every rank; float32, on the CPU.

    Raises:
        UnsupportedError: the gradients of a table are applied in the backward pass; the same on all ranks.
        InvalidInputError: ``norm_type`` is not above 0, or the norm is not finite, where that is an error.

    Example:
        >>> import shardwright as sw, torch
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> sw.clip_grad_norm_([weight], max_norm=1.0)
        tensor(5.)
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """
    if not norm_type > 0:
        raise InvalidInputError(f"clip_grad_norm_: norm_type must be above 0, got {norm_type!r}")
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    gradients = [own.grad for own in given if own.grad is not None]
    norm = _norm(gradients, float(norm_type))
    if error_if_nonfinite and not math.isfinite(norm):
        raise InvalidInputError(f"clip_grad_norm_: the norm of the gradients of all ranks is {norm}")
    # As torch.nn.utils.clip_grad_norm_ has it: gradients below the norm are multiplied by 1.
    factor = min(1.0, float(max_norm) / (norm + 1e-6)) if not math.isnan(norm) else norm
    for own in gradients:
        own.mul_(factor)
    return torch.tensor(norm, dtype=torch.float32)


def _norm(gradients: Sequence[Tensor], norm_type: float) -> float:
    """The norm over all ranks, by one collective."""
    for own in gradients:
        if isinstance(own, AppliedGradient):
            own.norm()  # refused
    sharded = [own for own in gradients if isinstance(own, ShardGradient)]
    dense = [_dense_power(own, norm_type) for own in gradients if not isinstance(own, ShardGradient)]
    mine = (
        total_of(dense, norm_type),
        total_of([power_of(own.local, norm_type, own.part.num_copies) for own in sharded], norm_type),
    )
    told, share = [mine], 1.0
    if sharded:
        env = sharded[0].part.env
        told, share = env.everyone.communicator.all_gather_objects(mine), share_of(env)
    of_tables = total_of([tables for _, tables in told], norm_type)
    # The dense ones' of rank 0, so that all have the same bits.
    total = total_of([told[0][0], of_tables if norm_type == math.inf else share * of_tables], norm_type)
    return total if norm_type == math.inf else total ** (1 / norm_type)


def _dense_power(gradient: Tensor, norm_type: float) -> float:
    """The sum of the powers of a gradient's elements, or the greatest element."""
    values: Any = gradient.coalesce().values() if gradient.is_sparse else gradient
    # What fully_shard cuts over the ranks, which all come here.
    return power_of(values.full_tensor() if hasattr(values, "full_tensor") else values, norm_type)
