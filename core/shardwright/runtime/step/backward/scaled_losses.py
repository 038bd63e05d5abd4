"""Losses that a ``GradScaler`` scales: refused where sharded tables cannot be trained with them.

An optimizer in the backward pass takes each gradient as it comes, with the scale, also in a step that the scaler skips.
If each rank has a part of a table, one rank alone sees the infinities of that part, and skips a step that the others
make. The scaler's own calls do not show this, because it may be given the optimizer of the dense part alone. So each
loss is followed back to sharded tables when it is scaled, before anything is changed.

Tables that are updated in the optimizer's step train with a scaler: their kept gradients are unscaled with the dense
ones, and the ranks tell each other of infinities, so that all skip the same steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from shardwright.error_reports import reporting_errors
from shardwright.errors import UnsupportedError

if TYPE_CHECKING:
    from shardwright.runtime.step.backward.kept_gradients import KeptUpdates

FUSED_REFUSAL = (
    "its optimizer runs in the backward pass, and would take the scaled gradient, also in steps that the scaler "
    "skips"
)
PARTED_REFUSAL = "each rank has a part of it, and would skip a step for infinities that only that rank sees"
ADVICE = (
    "Train in bfloat16 (torch.autocast), which needs no scaler, or in float32, with GradScaler(enabled=False)"
)
IN_STEP_ADVICE = (
    "Shard it with update='in_step', an argument of its sharder and of DistributedModelParallel: optimizer.step() then "
    "applies its gradients"
)


@cache
def watch_scalers() -> None:
    """Wrap ``GradScaler``, which has no hooks: to check each loss from now on, and to unscale kept gradients."""
    original = GradScaler.scale

    @wraps(original)
    def scale(self: GradScaler, outputs: Any) -> Any:
        if self.is_enabled():
            refuse_scaling(outputs)
        return original(self, outputs)

    GradScaler.scale = scale  # type: ignore[method-assign]
    unscale = GradScaler._unscale_grads_

    @wraps(unscale)
    def unscale_with_tables(
        self: GradScaler, optimizer: Optimizer, inv_scale: Tensor, *rest: Any, **named: Any
    ) -> dict[torch.device, Tensor]:
        found = unscale(self, optimizer, inv_scale, *rest, **named)
        return _unscale_tables(optimizer, inv_scale, found)

    GradScaler._unscale_grads_ = unscale_with_tables  # type: ignore[method-assign]


def _unscale_tables(
    optimizer: Optimizer, inverse_scale: Tensor, found: dict[torch.device, Tensor]
) -> dict[torch.device, Tensor]:
    """Unscale the kept gradients of tables; every rank makes this call.

    Args:
        optimizer: given to the scaler.
        inverse_scale: factor of gradients.
        found: above 0 for each device of which a dense gradient is infinite or no number.

    Returns:
        The same, above 0 on every rank if one of any rank is.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    of_parameters = [getattr(parameter, "updates", None) for parameter in parameters]
    kept: list[KeptUpdates] = list({id(own): own for own in of_parameters if own is not None}.values())
    if not kept:
        return found
    of_tables = [own.unscale(inverse_scale) for own in kept]  # all of them, whatever the first has
    here = any(of_tables) or any(bool(flag) for flag in found.values())
    anywhere = any(kept[0].env.everyone.communicator.all_gather_objects(here))
    return {**found, inverse_scale.device: torch.full_like(inverse_scale, float(anywhere))}


def refuse_scaling(losses: Any) -> None:
    """Check that losses do not come from sharded tables that cannot be trained with scaled gradients.

    Args:
        losses: a tensor, or a list or tuple of tensors.

    Raises:
        UnsupportedError: a loss does. Nothing was changed yet; the text says why and what to do.
    """
    for node in _nodes([loss for loss in pytree.tree_leaves(losses) if isinstance(loss, Tensor)]):
        reason = getattr(node, "scaling_refusal", "")
        if reason:
            with reporting_errors():
                raise UnsupportedError(
                    f"GradScaler.scale() was given a loss of sharded tables. {reason}. {ADVICE}."
                )


def _nodes(losses: list[Tensor]) -> Iterator[Any]:
    """Yield the nodes of the losses' autograd graph, each once."""
    seen = set()
    to_come = [loss.grad_fn for loss in losses]
    while to_come:
        node = to_come.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            to_come += [before for before, _ in node.next_functions]
