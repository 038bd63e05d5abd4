"""Maps that count the ids of several ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwright_torchrec.modules.managed_collisions.maps import ManagedCollisionModule


def join_maps(model: torch.nn.Module, group: Any) -> None:
    """Let the maps of a model count the ids of all ranks of a group; every rank makes this call.

    Args:
        model: the model.
        group: process group; `None` or a group of one rank: the maps count their own.
    """
    if group is not None and dist.get_world_size(group) == 1:
        group = None
    for module in model.modules():
        if isinstance(module, ManagedCollisionModule):
            module.process_group = group
