"""Guards before a lookup: tables frozen or unfrozen after sharding, and losses that will be scaled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwright.contracts import TrainedCollection
from shardwright.errors import UnsupportedError


def check_trained(parameters: Sequence[tuple[str, Any, bool]]) -> None:
    """Check that what was trained when it was sharded is trained now, and nothing else.

    Args:
        parameters: description of the table, parameter, and whether it was trained then.

    Raises:
        UnsupportedError: a table was frozen or unfrozen since.
    """
    for table, parameter, was_trained in parameters:
        if parameter.requires_grad is was_trained:
            continue
        if was_trained:
            raise UnsupportedError(
                f"table {table} was frozen (requires_grad_(False)) after it was sharded, but its optimizer runs in the "
                "kernel and would go on to update it. Look it up in torch.no_grad(), or unfreeze it and set the "
                "learning rate of its group in fused_optimizer.param_groups to 0"
            )
        raise UnsupportedError(
            f"table {table} was frozen when it was sharded, and requires gradients now, which it does not get: "
            "unfreeze it before it is sharded (save a checkpoint, and load it into a model that is sharded again)"
        )


def check_scale(collection: TrainedCollection) -> None:
    """Check that losses may be scaled, where they will be: float16 has no range for gradients without that.

    Raises:
        UnsupportedError: a lookup in float16 of tables that cannot take scaled gradients.
    """
    kind = collection.device_type
    if not torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) is not torch.float16:
        return
    if collection.limited:
        refusal = (
            f"table {collection.limited} has a max_gradient, to which scaled gradients would be clipped: leave it out "
            "of fused_params, and clip by torch.nn.utils.clip_grad_value_ after scaler.unscale_()"
        )
    elif collection.updated_in_backward:
        refusal = (
            f"table {collection.updated_in_backward} is updated in the backward pass, and would take the scaled "
            "gradient, also in steps that the scaler skips. Shard it with update='in_step', an argument of its sharder "
            "and of DistributedModelParallel: optimizer.step() then applies its gradients"
        )
    else:
        return
    raise UnsupportedError(
        f"{refusal}. Losses in float16 are scaled (GradScaler): train in bfloat16, "
        "torch.autocast(..., dtype=torch.bfloat16), which needs no scaler, or in float32"
    )
