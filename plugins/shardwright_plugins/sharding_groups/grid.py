"""Two-dimensional parallelism: sharding groups of ranks, and the replicas of each shard over the groups.

``W`` ranks are ``R = W / S`` sharding groups of ``S`` ranks. Tables are sharded over the ranks of one group, and all
groups have the same plan; the ranks that hold the same shards, one of each group, are a replica group, and average
them. Names and arrangements are those of TorchRec's ``DMPCollection``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs
from attrs import field, frozen

from shardwright.arguments import PositiveInt, checked, typed, whole
from shardwright.errors import InvalidInputError
from shardwright.planning.machines.replicas import Replicas
from shardwright.planning.machines.topology import InputValue, Topology


@frozen(field_transformer=typed)
class RankGrid:
    """All ranks of a job as a grid: a rank is a place in one sharding group and in one replica group.

    Sharding groups are ranks ``R`` apart and replicas neighbours (averaging stays inside hosts, as far as it can); or,
    ``use_inter_host_allreduce``, sharding groups are neighbours and replicas ``S`` apart.

    Args:
        world_size: ranks of the job, ``W``.
        sharding_group_size: ranks of a sharding group, ``S``.
        local_world_size: ranks of a host.
        use_inter_host_allreduce: sharding groups are neighbouring ranks.

    Raises:
        InvalidInputError: a number is not positive, or ranks do not divide into groups.
    """

    world_size: PositiveInt
    sharding_group_size: PositiveInt = field(converter=whole)
    local_world_size: PositiveInt
    use_inter_host_allreduce: bool = False

    def __attrs_post_init__(self) -> None:
        if self.world_size % self.sharding_group_size:
            possible = [size for size in range(1, self.world_size + 1) if self.world_size % size == 0]
            raise InvalidInputError(
                f"{self.world_size} ranks do not divide into sharding groups of {self.sharding_group_size} "
                f"(sharding_group_size); {self.world_size % self.sharding_group_size} would be left over. Possible: "
                f"{', '.join(map(str, possible))}"
            )

    @property
    def num_groups(self) -> int:
        """Sharding groups, ``R``."""
        return self.world_size // self.sharding_group_size

    def sharding_group(self, rank: int) -> range:
        """The ranks over which the tables of ``rank`` are sharded, in the order of a plan's ranks."""
        if self.use_inter_host_allreduce:
            first = rank - rank % self.sharding_group_size
            return range(first, first + self.sharding_group_size)
        return range(rank % self.num_groups, self.world_size, self.num_groups)

    def replica_group(self, rank: int) -> range:
        """The ranks that hold the same shards as ``rank``, one of each sharding group."""
        if self.use_inter_host_allreduce:
            return range(rank % self.sharding_group_size, self.world_size, self.sharding_group_size)
        first = rank - rank % self.num_groups
        return range(first, first + self.num_groups)

    def local_size(self, ranks: Sequence[int]) -> int:
        """The largest number of ranks into which the hosts' parts of a group all divide."""
        return math.gcd(*Counter(rank // self.local_world_size for rank in ranks).values())

    @checked
    def hosts_of(self, node_group_size: PositiveInt) -> int:
        """Ranks of a sharding group that count as one host.

        Raises:
            InvalidInputError: the group does not divide into such hosts.
        """
        if self.sharding_group_size % node_group_size:
            raise InvalidInputError(
                f"a sharding group of {self.sharding_group_size} ranks does not divide into hosts of {node_group_size} "
                f"(node_group_size); {self.sharding_group_size % node_group_size} would be left over"
            )
        return int(node_group_size)

    def replicas(self, sync_every: int) -> Replicas:
        """Summarise the other sharding groups for a plan of one of them."""
        # Each replica group has one of its ranks in any sharding group.
        local = min(self.local_size(self.replica_group(rank)) for rank in self.sharding_group(0))
        return Replicas(self.num_groups, sync_every, local)


def sharding_group(
    topology: Topology,
    sharding_group_size: int,
    *,
    sync_every: int,
    use_inter_host_allreduce: bool,
    node_group_size: int | None,
) -> Topology:
    """The topology of one sharding group of some ranks: see :meth:`Topology.sharding_group`."""
    if topology.replicas is not None:
        raise InvalidInputError("this is the topology of a sharding group already")
    if topology.is_mixed:
        raise InvalidInputError(
            f"sharding groups are of ranks with one type of device; these have {' and '.join(topology.device_types)}"
        )
    size = sharding_group_size
    grid = RankGrid(topology.world_size, size, topology.local_world_size, use_inter_host_allreduce)
    own = grid.local_size(grid.sharding_group(0))
    local = own if node_group_size is None else grid.hosts_of(node_group_size)
    replicas = grid.replicas(sync_every)
    changed = {"world_size": size, "local_world_size": local, "replicas": attrs.asdict(replicas)}
    return topology.evolved(
        world_size=size,
        compute_devices=topology.compute_devices[:size],
        local_world_size=local,
        memory_bytes={tier: _least(values, grid) for tier, values in topology.memory_bytes.items()},
        replicas=replicas,
        speeds=_least(topology.speeds, grid),
        provenance={
            **topology.provenance,
            **{name: InputValue(value, "given") for name, value in changed.items()},
        },
    )


def _least(values: tuple[Any, ...], grid: RankGrid) -> tuple[Any, ...]:
    """Take the least of the values of each rank's replicas, for the ranks of a sharding group."""
    if len(set(values)) == 1:
        return values[: grid.sharding_group_size]
    return tuple(min(values[other] for other in grid.replica_group(rank)) for rank in grid.sharding_group(0))
