"""Two-dimensional parallelism: the replicas of each shard over several sharding groups with the same plan."""

from __future__ import annotations

from attrs import field, frozen

from shardwright.arguments import PositiveInt, typed, whole
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
