"""State dicts of shards made into ones of whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards

State = Mapping[str, Tensor | ShardedTensor]


def state_dict_gather(src: State, dst: Mapping[str, Tensor]) -> None:
    """Copy a state dict into whole tensors: sharded ones on rank 0 alone; every rank makes this call.

    Args:
        src: tensors, or shards of them.
        dst: whole tensors, of the same names.
    """
    for name, whole in dst.items():
        value = src[name]
        if isinstance(value, ShardedTensor):
            value.gather(0, whole if dist.get_rank() == 0 else None)
        else:
            whole.detach().copy_(value)


def state_dict_to_device(
    state_dict: State, pg: dist.ProcessGroup, device: torch.device
) -> dict[str, Tensor | ShardedTensor]:
    """A state dict on another device; shards stay shards.

    Args:
        state_dict: tensors, or shards of them.
        pg: process group of the new shards.
        device: device to copy to.
    """
    return {name: _moved(state_dict[name], pg, device) for name in state_dict}


def _moved(value: Tensor | ShardedTensor, pg: dist.ProcessGroup, device: torch.device) -> Any:
    if not isinstance(value, ShardedTensor):
        return value.detach().to(device)
    shards = []
    for shard in value.local_shards():
        rank = shard.metadata.placement.rank()
        offsets = shard.metadata.shard_offsets
        shards.append(Shard.from_tensor_and_offsets(shard.tensor.detach().to(device), offsets, rank))
    return init_from_local_shards(shards, value.size(), process_group=pg)
