"""The ranks of two-dimensional parallelism, as one rank sees them: its sharding group, its replicas, and all ranks."""

from __future__ import annotations

from typing import Any

from attrs import evolve, field, frozen

from shardwright.contracts.comm_backend import CommBackend
from shardwright.runtime.ranks.alone import LoneCommunicator
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.ranks.group_ranks import GroupRanks
from shardwright_plugins.sharding_groups.grid import RankGrid


@frozen
class ShardingEnv2D(ShardingEnv):
    """A sharding group that is one of several: tables are sharded inside it, and averaged with its replicas.

    The attributes of :class:`ShardingEnv` (``rank``, ``world_size``, ``communicator``, ``process_group``) are those of
    the sharding group.

    Args:
        grid: division of all ranks into groups.
        replicas: environment of the ranks that hold the same shards as this one, one of each sharding group.
    """

    grid: RankGrid = field(kw_only=True)
    replicas: ShardingEnv = field(kw_only=True, repr=False)

    @property
    def num_sharding_groups(self) -> int:
        """Number of sharding groups."""
        return self.grid.num_groups

    @property
    def ranks_of_all(self) -> range:
        """Numbers of the ranks of the sharding group among all."""
        return self.grid.sharding_group(self.everyone.rank)

    def planning_topology(self, topology: Any) -> Any:
        """The topology of the sharding group, of that of all ranks."""
        return topology.sharding_group(
            self.grid.sharding_group_size,
            use_inter_host_allreduce=self.grid.use_inter_host_allreduce,
            node_group_size=self.local_world_size,
        )

    @classmethod
    def of(
        cls, sharding: ShardingEnv, replicas: ShardingEnv, all_ranks: ShardingEnv, grid: RankGrid
    ) -> ShardingEnv2D:
        """Combine the environments of a rank's groups into one."""
        return cls(
            sharding.communicator,
            sharding.device_type,
            sharding.process_group,
            sharding.local_world_size,
            sharding.lockstep,
            all_ranks,
            sharding.headers,
            sharding.ranks,
            grid=grid,
            replicas=replicas,
        )

    @classmethod
    def make_groups(
        cls,
        sharding_group_size: int,
        global_pg: Any = None,
        *,
        node_group_size: int | None = None,
        use_inter_host_allreduce: bool = False,
        device_type: str | None = None,
        comm_backend: str | CommBackend | None = None,
    ) -> ShardingEnv2D:
        """Divide the ranks of a process group, and connect each with its groups; every rank of it makes this call.

        Every rank 1. connects with all ranks, 2. compares the arguments with theirs, 3. makes a process group for its
        sharding group, 4. and one for its replicas.

        Args:
            sharding_group_size: number of ranks of a sharding group.
            global_pg: process group of all ranks; the world by default.
            node_group_size: number of ranks of a sharding group that count as one host; by default those on one host.
            use_inter_host_allreduce: sharding groups are neighbouring ranks; else replicas are.
            device_type: type of the devices, as in :meth:`ShardingEnv.from_process_group`.
            comm_backend: comm backend, as in :meth:`ShardingEnv.from_process_group`.

        Raises:
            InvalidInputError: the ranks do not divide into such groups, or a group not into such hosts.
            DistributedError: ranks ask for different groups; or another rank failed in this call.
        """
        everyone = ShardingEnv.from_process_group(
            global_pg, device_type=device_type, comm_backend=comm_backend
        )
        with everyone.together("making sharding groups"):
            grid = RankGrid(
                everyone.world_size, sharding_group_size, everyone.local_world_size, use_inter_host_allreduce
            )
            # Otherwise some would wait in groups that others do not make.
            asked = {
                "sharding_group_size": sharding_group_size,
                "node_group_size": node_group_size,
                "groups": grid,
            }
            everyone.agree("sharding groups", asked, _ASK_ALIKE)
            sharding = _group(everyone, grid, grid.sharding_group(everyone.rank), comm_backend)
            replicas = _group(everyone, grid, grid.replica_group(everyone.rank), comm_backend)
            if node_group_size is not None:
                sharding = evolve(sharding, local_world_size=grid.hosts_of(node_group_size))
            return cls.of(sharding, replicas, everyone, grid)


_ASK_ALIKE = "Give every rank the same sharding_group_size, node_group_size and use_inter_host_allreduce"


def _group(
    everyone: ShardingEnv, grid: RankGrid, ranks: range, comm_backend: str | CommBackend | None
) -> ShardingEnv:
    """Make the environment of some of the ranks, this one among them; each of them makes this call."""
    local = grid.local_size(ranks)
    if len(ranks) == everyone.world_size:
        return evolve(everyone, local_world_size=local)
    if len(ranks) == 1:
        return ShardingEnv(LoneCommunicator(), everyone.device_type)
    group = GroupRanks.of(everyone.process_group).new_group("a sharding group or its replicas", ranks)
    env = ShardingEnv.from_process_group(group, device_type=everyone.device_type, comm_backend=comm_backend)
    return evolve(env, local_world_size=local)
