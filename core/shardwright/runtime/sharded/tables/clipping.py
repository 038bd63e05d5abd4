"""Clipping of gradients of dense parameters and sharded tables: by one norm, the same on all ranks, or by value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from shardwright.error_reports import reporting_errors
from shardwright.errors import InvalidInputError, UnsupportedError
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.sharded.tables.sharded_parameter import ShardedParameter, clipping_refusal
from shardwright.runtime.step.backward.kept_gradients import KeptBlock

_BY_NORM, _BY_VALUE = "shardwright.clip_grad_norm_", "shardwright.clip_grad_value_"


@frozen
class _RankPart:
    """A rank's part of a norm: sums of powers of gradients, or their maximum for the infinite norm.

    Args:
        dense: sum over parameters that are alike on all ranks.
        tables: sum over this rank's blocks, each divided by the number of its copies.
        refusal: the reason why this rank cannot take the norm; empty if it can.
    """

    dense: float
    tables: float
    refusal: str


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
    gradients = _Gradients.of([parameters] if isinstance(parameters, Tensor) else list(parameters), _BY_NORM)
    norm = gradients.norm(float(norm_type))
    if error_if_nonfinite and not math.isfinite(norm):
        raise InvalidInputError(f"clip_grad_norm_: the norm of the gradients of all ranks is {norm}")
    # As torch.nn.utils.clip_grad_norm_ has it: gradients below the norm are multiplied by 1.
    gradients.scale(min(1.0, float(max_norm) / (norm + 1e-6)) if not math.isnan(norm) else norm)
    return torch.tensor(norm, dtype=torch.float32)


@torch.no_grad()
def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
    """Clip each element of gradients to at most ``clip_value``, up and down.

    Called after the backward pass; no rank waits for another. Tables need ``update="in_step"``, or a compute kernel
    that shows gradients: each element is that of the whole table, averaged over the ranks.

    Args:
        parameters: parameters of the model, ``model.parameters()``.
        clip_value: largest element, in absolute value.

    Raises:
        UnsupportedError: the gradients of a table are applied in the backward pass.
        InvalidInputError: ``clip_value`` is not above 0.

    Example:
        >>> import shardwright as sw, torch
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([0.5, -4.0])
        >>> sw.clip_grad_value_([weight], clip_value=1.0)
        >>> weight.grad
        tensor([ 0.5000, -1.0000])
    """
    if not clip_value > 0:
        raise InvalidInputError(f"clip_grad_value_: clip_value must be above 0, got {clip_value!r}")
    gradients = _Gradients.of([parameters] if isinstance(parameters, Tensor) else list(parameters), _BY_VALUE)
    if gradients.refusal:
        with reporting_errors():
            raise UnsupportedError(gradients.refusal)
    gradients.clamp(float(clip_value))


@frozen(eq=False)
class _Gradients:
    """The gradients of some parameters on this rank.

    Args:
        dense: gradients of parameters that are alike on all ranks.
        tables: gradients of blocks of tables, with the number of copies of each.
        kept: blocks that keep theirs for the optimizer's step.
        env: environment of the ranks; ``None`` where no table is among the parameters.
        refusal: the reason why they cannot be clipped.
    """

    dense: Sequence[Tensor]
    tables: Sequence[tuple[Tensor, int]]
    kept: Sequence[KeptBlock]
    env: ShardingEnv | None
    refusal: str

    @classmethod
    def of(cls, parameters: Sequence[Tensor], who: str) -> _Gradients:
        """Collect the gradients of parameters, for a function to clip."""
        sharded = [own for own in parameters if isinstance(own, ShardedParameter) and own.table is not None]
        others = (
            [own for own in parameters if not any(own is other for other in sharded)]
            if sharded
            else parameters
        )
        shown = [own for own in sharded if not own.is_fused and own.grad is not None]
        # Whichever of a table's blocks was given, all are clipped.
        kept = {(id(own.lookup), own.index): own for given in sharded for own in given.kept_of_table}
        refused = next((own for own in sharded if own.is_fused and own.updates is None), None)
        return cls(
            dense=[own.grad for own in others if own.grad is not None],
            tables=[(own.grad, own.num_copies) for own in shown if own.grad is not None],
            kept=list(kept.values()),
            env=next((own.env for own in sharded if own.env is not None), None),
            refusal="" if refused is None else clipping_refusal(who, refused),
        )

    def norm(self, norm_type: float) -> float:
        """The norm over all ranks.

        Raises:
            UnsupportedError: a rank has a table whose gradients are applied in the backward pass.
        """
        kept = ((own.values, own.num_copies) for own in self.kept)
        of_tables = [*self.tables, *((values, copies) for values, copies in kept if values is not None)]
        mine = _RankPart(
            _total([_power(own, norm_type) for own in self.dense], norm_type),
            _total([_power(own, norm_type, copies) for own, copies in of_tables], norm_type),
            self.refusal,
        )
        everyone = None if self.env is None else self.env.everyone
        told = [mine] if everyone is None else everyone.communicator.all_gather_objects(mine)
        refusal = next((part.refusal for part in told if part.refusal), "")
        if refusal:
            raise UnsupportedError(refusal)
        tables = _total([part.tables for part in told], norm_type)
        if everyone is not None and norm_type != math.inf and self.env is not None:
            # Each sharding group has a replica of the tables: the mean of their powers counts.
            tables *= self.env.world_size / everyone.world_size
        total = _total([told[0].dense, tables], norm_type)  # rank 0's, so that all have the same bits
        return total if norm_type == math.inf else total ** (1 / norm_type)

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        for own in (*self.dense, *(own for own, _ in self.tables)):
            own.mul_(factor)
        for block in self.kept:
            block.scale(factor)

    def clamp(self, most: float) -> None:
        """Clip each element of all gradients."""
        for own in (*self.dense, *(own for own, _ in self.tables)):
            own.clamp_(-most, most)
        for block in self.kept:
            block.clamp(most)


def _power(gradient: Tensor, norm_type: float, num_copies: int = 1) -> float:
    """The sum of the powers of a gradient's elements, divided by its copies; or the greatest element."""
    if gradient.numel() == 0:
        return 0.0
    values: Any = gradient.coalesce().values() if gradient.is_sparse else gradient
    is_cut = hasattr(values, "full_tensor")  # over the ranks, by fully_shard; all of them come here
    if is_cut and norm_type == math.inf:
        values = values.full_tensor()  # a rank may have an empty part, which has no greatest element
    norms: Any = torch.linalg.vector_norm(values, norm_type, dtype=torch.float64)
    norm = float(norms.full_tensor() if is_cut and norm_type != math.inf else norms)
    return norm if norm_type == math.inf else norm**norm_type / num_copies


def _total(values: Sequence[float], norm_type: float) -> float:
    """The sum, or for the infinite norm the maximum, which is no number if a value is none."""
    if norm_type == math.inf:
        return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)
    return sum(values)
