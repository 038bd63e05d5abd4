"""Shardings that are to be read alone: their shards are on devices that no rank here has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import shardwright as sw

__all__ = ["WrittenSharding"]


class WrittenSharding(sw.ParameterSharding):
    """A table's sharding with its shards as they were written, such as some on a rank's GPU and some on its host.

    Whoever asks for its layout, as sharding by it does, is refused.

    Args:
        sharding_type: name of the sharding type.
        compute_kernel: name of the compute kernel.
        ranks: the rank of each shard.
        shards: the shards; a placement may say another rank, as TorchRec's `"rank:0/cpu"` does.
    """

    def __init__(
        self,
        sharding_type: str,
        compute_kernel: str,
        ranks: Sequence[int],
        shards: Sequence[sw.ShardMetadata],
    ) -> None:
        written = {
            "sharding_type": sharding_type,
            "compute_kernel": compute_kernel,
            "qcomms_config": None,
            "local_world_size": None,
            "_ranks": list(ranks),
            "_shards": list(shards),
        }
        for name, value in written.items():
            object.__setattr__(self, name, value)  # the base is frozen

    @property
    def ranks(self) -> list[int]:
        """The rank of each shard."""
        return list(self.__dict__["_ranks"])

    @property
    def sharding_spec(self) -> sw.EnumerableShardingSpec:
        """The shards."""
        return sw.EnumerableShardingSpec(list(self.__dict__["_shards"]))

    @property
    def layout(self) -> NoReturn:  # type: ignore[override]  # there is none
        """No layout.

        Raises:
            UnsupportedError: always.
        """
        places = ", ".join(dict.fromkeys(str(shard.placement) for shard in self.sharding_spec.shards))
        raise sw.UnsupportedError(
            f"{self.sharding_type} with shards on ranks {self.ranks}, placed on {places}, is a plan to read alone: a "
            "rank has one device, with all its shards. A compute kernel such as 'fused_uvm' keeps rows in the host's "
            "memory; construct_module_sharding_plan(device_type=...) says another device for all."
        )

    @property
    def device(self) -> NoReturn:  # type: ignore[override]  # there are several
        """No type of device, see `layout`."""
        return self.layout

    def described_shards(self) -> Iterator[tuple[list[int], list[int], str]]:
        """Offsets, sizes and placement of each shard, for texts."""
        for shard in self.sharding_spec.shards:
            yield shard.shard_offsets, shard.shard_sizes, shard.placement

    @property
    def _written(self) -> tuple[Any, ...]:
        return self.sharding_type, self.compute_kernel, self.ranks, self.sharding_spec.shards

    def digest(self) -> bytes:
        """A hash of all that it says."""
        return repr(self._written).encode()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WrittenSharding) and self._written == other._written

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]  # as the base

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._written
