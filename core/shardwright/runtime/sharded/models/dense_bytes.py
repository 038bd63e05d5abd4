"""Bytes of the part of a model that is not sharded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from shardwright.planning.machines.reservations import DenseBytes
from shardwright.runtime.sharded.collections.sharded_collection import ShardedCollection
from shardwright.runtime.sharded.collections.sharders import ModuleSharder, shardable_modules


def dense_bytes(module: nn.Module, sharders: Sequence[ModuleSharder]) -> DenseBytes:
    """Bytes of the parameters and buffers of ``module`` (on any device) outside collections, sharded already or not."""
    sharded: list[nn.Module] = [child for child in module.modules() if isinstance(child, ShardedCollection)]
    sharded += [child for _, child, _ in shardable_modules(module, sharders)]
    return DenseBytes(
        parameters=_bytes(module.parameters()) - sum(_bytes(child.parameters()) for child in sharded),
        buffers=_bytes(module.buffers()) - sum(_bytes(child.buffers()) for child in sharded),
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
