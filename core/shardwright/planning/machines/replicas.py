"""Two-dimensional parallelism: sharding groups of ranks, and the replicas of each shard over the groups.

``W`` ranks are ``R = W / S`` sharding groups of ``S`` ranks. Tables are sharded over the ranks of one group, and all
groups have the same plan; the ranks that hold the same shards, one of each group, are a replica group, and average
them. Names and arrangements are those of TorchRec's ``DMPCollection``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from attrs import field, frozen

from shardwright.arguments import PositiveInt, checked, typed, whole
from shardwright.errors import InvalidInputError


@frozen(field_transformer=typed)
class Replicas:
    """Facts about the other sharding groups that a plan for one of them needs.

    Args:
        num_groups: sharding groups, ``R``; each has a replica of every shard.
        sync_every: steps from one averaging of the replicas to the next, ``K``.
        local_replicas: replicas of one shard that are on ranks of one host.

    Example:
        >>> import shardwright as sw
        >>> sw.Topology(64, "cuda", local_world_size=8).sharding_group(8, sync_every=100).replicas
        Replicas(num_groups=8, sync_every=100, local_replicas=8)
    """

    num_groups: PositiveInt
    sync_every: PositiveInt = field(default=1, converter=whole)
    local_replicas: PositiveInt = 1

    def __attrs_post_init__(self) -> None:
        if self.local_replicas > self.num_groups:
            raise InvalidInputError(
                f"local_replicas is {self.local_replicas}: {self.num_groups} sharding groups have no more replicas of "
                "a shard"
            )


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
