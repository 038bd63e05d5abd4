"""Norms, sums, means and extremes of gradients of sharded tables, over all ranks; and what gradient scalers do.

All ranks come to such an operation, since each has as many parameters of a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.sharded.tables.shard_gradients import ShardGradient


def power_of(values: Tensor, norm_type: float, num_copies: int = 1) -> float:
    """The sum of the powers of elements, divided by the number of copies; or the greatest of infinitely great power."""
    if values.numel() == 0:
        return 0.0
    norm = float(torch.linalg.vector_norm(values, norm_type, dtype=torch.float64))
    return norm if norm_type == math.inf else norm**norm_type / num_copies


def total_of(powers: Sequence[float], norm_type: float) -> float:
    """The sum, or for the infinite norm the maximum, which is no number if a value is none."""
    return _most(powers) if norm_type == math.inf else sum(powers)


def _most(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)


def share_of(env: ShardingEnv) -> float:
    """The weight of a sum over all ranks: each sharding group has a replica of the tables, and the mean counts."""
    return env.world_size / env.everyone.world_size


def norms_over_ranks(gradients: Sequence[ShardGradient], norm_type: float) -> list[float]:
    """The norm of each gradient over all ranks, by one collective.

    Args:
        gradients: this rank's parts.
        norm_type: exponent above 0; may be ``math.inf``.
    """
    if not norm_type > 0:
        gradients[0].refuse(f"the norm of exponent {norm_type}")
    mine = [power_of(own.local, norm_type, own.part.num_copies) for own in gradients]
    env = gradients[0].part.env
    told = env.everyone.communicator.all_gather_objects(mine)
    totals = [total_of(powers, norm_type) for powers in zip(*told, strict=True)]
    return totals if norm_type == math.inf else [(share_of(env) * own) ** (1 / norm_type) for own in totals]


def _norms(func: Any, name: str, args: Any, kwargs: Any) -> list[Tensor]:
    gradients, norm_type = args[0], float(args[1]) if len(args) > 1 else 2.0
    norms = iter(norms_over_ranks([own for own in gradients if isinstance(own, ShardGradient)], norm_type))
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    return [
        torch.tensor(next(norms), dtype=dtype or own.dtype, device=own.device)
        if isinstance(own, ShardGradient)
        else torch.linalg.vector_norm(own, norm_type, dtype=dtype)
        for own in gradients
    ]


def _norm(func: Any, name: str, args: Any, kwargs: Any) -> Tensor:
    _check_whole(args[0], name, args[2:])
    return _norms(func, name, ([args[0]], *args[1:2]), kwargs)[0]


def _check_whole(own: ShardGradient, name: str, rest: Sequence[Any]) -> None:
    """Check that a reduction is over all dimensions, and that its result has none."""
    dims = rest[0] if rest else None
    is_whole = dims is None or (isinstance(dims, list) and {dim % 2 for dim in dims} in ({0, 1}, set()))
    if not is_whole or any(rest[1:2]):
        own.refuse(f"{name}() over some dimensions")


def _reduced(func: Any, name: str, args: Any, kwargs: Any) -> Tensor:
    own, values, kind = args[0], args[0].local, name.replace("am", "m")
    _check_whole(own, name, args[1:])
    if own.rows is not None and len(own.rows) < len(own) and kind != "sum":
        values = torch.cat([values.flatten(), values.new_zeros(1)])  # that of the other rows
    if kind in ("max", "min") and not values.numel():
        values = values.new_tensor([-math.inf if kind == "max" else math.inf])
    mine, env = getattr(values, kind)(**kwargs), own.part.env
    number = mine.item() / own.part.num_copies if kind == "sum" else mine.item()
    result = _COMBINED[kind](env.everyone.communicator.all_gather_objects(number))
    total = share_of(env) * result if kind == "sum" else result
    return torch.tensor(
        total if mine.is_floating_point() else round(total), dtype=mine.dtype, device=own.device
    )


def _moment(func: Any, name: str, args: Any, kwargs: Any) -> Tensor:
    """Mean, variance or standard deviation over the elements of all ranks; rows without a gradient are zeros."""
    own, values = args[0], args[0].local.double()
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    _check_whole(own, name, [dims, kwargs.get("keepdim", False)])
    share = share_of(own.part.env) / own.part.num_copies
    mine = [share * own.numel(), share * values.sum().item(), share * values.square().sum().item()]
    told = own.part.env.everyone.communicator.all_gather_objects(mine)
    count, total, squares = (sum(numbers) for numbers in zip(*told, strict=True))
    result = total / count
    if name != "mean":
        correction = kwargs.get("correction")
        result = max(squares - total * result, 0.0) / (count - (1 if correction is None else correction))
    result = math.sqrt(result) if name == "std" else result
    return torch.tensor(result, dtype=kwargs.get("dtype") or own.dtype, device=own.device)


def _unscaled(func: Any, name: str, args: Any, kwargs: Any) -> None:
    """Unscale as ``GradScaler`` does; an infinity that one rank sees is seen by all, which skip the same steps."""
    gradients, found, inverse = args
    func([own.whole if isinstance(own, ShardGradient) else own for own in gradients], found, inverse)
    env = next(own.part.env for own in gradients if isinstance(own, ShardGradient))
    found.fill_(float(any(env.everyone.communicator.all_gather_objects(bool(found)))))


_COMBINED: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "all": all,
    "any": any,
    "max": _most,
    "min": lambda values: -_most([-value for value in values]),
    "sum": sum,
}
_OVER_RANKS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("all", "amax", "amin", "any", "max", "min", "sum"), _reduced),
    **dict.fromkeys(("mean", "std", "var"), _moment),
    "linalg_vector_norm": _norm,
    "_foreach_norm": _norms,
    "_amp_foreach_non_finite_check_and_unscale_": _unscaled,
}


def over_ranks() -> Mapping[str, Callable[..., Any]]:
    """The functions that do torch's operators over all ranks, by the operators' names."""
    return _OVER_RANKS
