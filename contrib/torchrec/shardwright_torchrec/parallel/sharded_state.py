"""State dicts of which each rank has its shards: torch's `ShardedTensor`s, made without a collective.

Legend: R rows and C columns of a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed import _remote_device
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    TensorProperties,
)

import shardwright as sw
from shardwright_torchrec.distributed.comm import get_local_size
from shardwright_torchrec.planner.utils import placement


@frozen(eq=False)
class ShardedTable:
    """A table of a sharded model.

    Args:
        key: its name in the state dict.
        sharding: its part of the plan.
        blocks: this rank's blocks of it, as sharded tensors.
        parameters: this rank's parameters of it.
    """

    key: str
    sharding: sw.ParameterSharding
    blocks: Any
    parameters: tuple[Tensor, ...]

    @property
    def is_box(self) -> bool:
        """True if each shard is a run of rows and of columns, which is all that a `ShardedTensor` can say."""
        return all(block.rows.bounds is not None for block in self.sharding.layout.blocks)

    def state(self, *, is_distributed: bool) -> Any:
        """Its value in a local state dict, of shared storage.

        Args:
            is_distributed: there is a process group, without which there is no `ShardedTensor`.

        Returns:
            The whole table where it is on each rank; else a `ShardedTensor` ``[R, C]``, or the value of
            shardwright's `state_dict()` for rows that are dealt out.
        """
        is_whole = self.sharding.layout.is_replicated or not is_distributed
        if is_whole and len(self.parameters) == 1:
            return self.parameters[0].detach()
        return self._sharded() if self.is_box and is_distributed else self.blocks

    def take(self, value: Any) -> None:
        """Copy a loaded value into this rank's blocks.

        Args:
            value: what `state` gives, of a model sharded in the same way; or the whole table.

        Raises:
            InvalidInputError: its shards are others.
        """
        if isinstance(value, type(self.blocks)):
            return
        if isinstance(value, ShardedTensor):
            self._take_shards(value)
        else:
            self._take_whole(value)

    def _take_shards(self, value: ShardedTensor) -> None:
        given = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in value.local_shards()}
        own = dict(self._own())
        if {place: tensor.shape for place, tensor in given.items()} != {
            place: tensor.shape for place, tensor in own.items()
        }:
            raise sw.InvalidInputError(
                f"{self.key!r}: the state dict has the shards at {sorted(given)} on this rank, the model those at "
                f"{sorted(own)}. Load it with torch.distributed.checkpoint, which moves rows between ranks"
            )
        with torch.no_grad():
            for place, tensor in given.items():
                if tensor.data_ptr() != own[place].data_ptr():
                    own[place].copy_(tensor)

    def _take_whole(self, value: Tensor) -> None:
        if tuple(value.shape) != tuple(self.blocks.shape):
            raise sw.InvalidInputError(
                f"{self.key!r}: the state dict has the shape {list(value.shape)}, the model {list(self.blocks.shape)}"
            )
        with torch.no_grad():
            for piece in self.blocks.pieces:
                (row, column), (rows, columns) = piece.offsets, piece.sizes
                piece.values.copy_(value[row : row + rows, column : column + columns])

    def _own(self) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """This rank's blocks: first row and column, and the elements."""
        places = {piece.values.data_ptr(): piece.offsets for piece in self.blocks.pieces}
        for parameter in self.parameters:
            if parameter.numel():
                yield places[parameter.data_ptr()], parameter.detach()

    def _sharded(self) -> ShardedTensor:
        assert self.sharding.sharding_spec is not None  # it is not replicated
        shards = {
            tuple(shard.shard_offsets): ShardMetadata(
                list(shard.shard_offsets), list(shard.shard_sizes), self._place(rank)
            )
            for shard, rank in zip(self.sharding.sharding_spec.shards, self.sharding.ranks, strict=True)
            if min(shard.shard_sizes) > 0
        }
        metadata = ShardedTensorMetadata(
            list(shards.values()), torch.Size(self.blocks.shape), TensorProperties(dtype=self.blocks.dtype)
        )
        own = []
        for place, tensor in self._own():
            shards[place].placement = _remote_device(f"rank:{dist.get_rank()}/{tensor.device}")
            own.append(Shard(tensor, shards[place]))
        return ShardedTensor._init_from_local_shards_and_global_metadata(own, metadata)

    def _place(self, rank: int) -> str:
        """Place of a rank's shards: hosts number their devices each from 0."""
        return placement(self.sharding.device_on(rank), rank, get_local_size())


def blocks_of(module: nn.Module) -> dict[str, Any]:
    """This rank's blocks of each table, by its name in the state dict, on one rank too.

    Args:
        module: the model, with its sharded modules.
    """
    found = {}
    for path, child in module.named_modules():
        for name, table in getattr(child, "sharded_tables", {}).items():
            for tables in ("embedding_bags", "embeddings"):
                if name in getattr(child, tables, {}):
                    key = ".".join(part for part in (path, tables, name, "weight") if part)
                    found[key] = table.entries()["weight"]
    return found


def is_whole(state_dict: Mapping[str, Any], blocks: Mapping[str, Any]) -> bool:
    """True if a state dict has no shards, but whole tensors, as an unsharded model's has.

    Args:
        state_dict: the state dict.
        blocks: the model's blocks, as `blocks_of` gives them.
    """
    kinds = {type(value) for value in blocks.values() if hasattr(value, "pieces")} | {ShardedTensor}
    return not any(isinstance(value, tuple(kinds)) for value in state_dict.values())


def sharded_tables(module: nn.Module, plan: sw.ShardingPlan, state: Mapping[str, Any]) -> list[ShardedTable]:
    """The tables of a sharded model.

    Args:
        module: the model, with its sharded modules.
        plan: its plan.
        state: its blocks, as `blocks_of` gives them.
    """
    parameters: dict[str, list[Tensor]] = {}
    for name, parameter in module.named_parameters():
        path, _, own = name.rpartition(".")
        if own == "weight" or own.startswith("weight_"):
            parameters.setdefault(f"{path}.weight", []).append(parameter)
    found = []
    for path, tables in plan.plan.items():
        for name, sharding in tables.items():
            key = _key(path, name, state)
            if key is not None:
                found.append(ShardedTable(key, sharding, state[key], tuple(parameters.get(key, ()))))
    return found


def _key(path: str, table: str, state: Mapping[str, Any]) -> str | None:
    """Name of a table's weights in the state dict; none for rows that are stored by an index."""
    prefix = f"{path}." if path else ""
    for tables in ("embedding_bags", "embeddings"):
        if (key := f"{prefix}{tables}.{table}.weight") in state:
            return key
    return None
