"""Refusal of losses that a ``GradScaler`` scales: sharded tables cannot be trained with them.

An optimizer in the backward pass takes each gradient as it comes, with the scale, also in a step that the scaler skips.
If each rank has a part of a table, one rank alone sees the infinities of that part, and skips a step that the others
make. The scaler's own calls do not show this, because it may be given the optimizer of the dense part alone. So each
loss is followed back to sharded tables when it is scaled, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, wraps
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor
from torch.amp import GradScaler

from shardwright.error_listeners import reporting_errors
from shardwright.errors import UnsupportedError

FUSED_REFUSAL = (
    "its optimizer runs in the backward pass, and would take the scaled gradient, also in steps that the scaler "
    "skips"
)
PARTED_REFUSAL = "each rank has a part of it, and would skip a step for infinities that only that rank sees"
ADVICE = (
    "Train in bfloat16 (torch.autocast), which needs no scaler, or in float32, with GradScaler(enabled=False)"
)


@cache
def watch_scalers() -> None:
    """Wrap ``GradScaler.scale`` so that it checks each loss from now on; torch has no hook for that."""
    original = GradScaler.scale

    @wraps(original)
    def scale(self: GradScaler, outputs: Any) -> Any:
        if self.is_enabled():
            refuse_scaling(outputs)
        return original(self, outputs)

    GradScaler.scale = scale  # type: ignore[method-assign]


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
