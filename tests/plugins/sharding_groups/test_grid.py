"""Which ranks are in which sharding groups and replica groups, and the topology of a group."""

from __future__ import annotations

import pytest

from shardwright import InvalidInputError, Replicas, Topology
from shardwright_plugins.sharding_groups.grid import RankGrid


@pytest.mark.parametrize("is_inter_host", [False, True])
@pytest.mark.parametrize(("world_size", "size"), [(8, 4), (6, 2), (4, 4), (4, 1), (1, 1)])
def test_each_sharding_group_meets_each_replica_group_once(
    world_size: int, size: int, is_inter_host: bool
) -> None:
    grid = RankGrid(world_size, size, world_size, is_inter_host)
    for rank in range(world_size):
        sharding, replicas = grid.sharding_group(rank), grid.replica_group(rank)
        assert (len(sharding), len(replicas)) == (size, world_size // size)
        assert set(sharding) & set(replicas) == {rank}
        # Replicas hold the same shards: their places in their sharding groups are the same.
        assert {grid.sharding_group(other).index(other) for other in replicas} == {sharding.index(rank)}
        assert all(grid.sharding_group(other) == sharding for other in sharding)


def test_groups_are_those_of_torchrec() -> None:
    grid = RankGrid(8, 4, 4)
    assert list(grid.sharding_group(1)) == [1, 3, 5, 7]
    assert list(grid.replica_group(3)) == [2, 3]
    neighbours = RankGrid(8, 4, 4, use_inter_host_allreduce=True)
    assert list(neighbours.sharding_group(5)) == [4, 5, 6, 7]
    assert list(neighbours.replica_group(5)) == [1, 5]


@pytest.mark.parametrize(
    ("options", "local", "replicas"),
    [
        ({}, 2, Replicas(4, 1, 4)),  # neighbours average, two ranks of a group on a host
        ({"use_inter_host_allreduce": True, "sync_every": 8}, 8, Replicas(4, 8, 1)),
        ({"node_group_size": 4}, 4, Replicas(4, 1, 4)),
    ],
)
def test_topology_of_a_group_has_its_hosts_and_replicas(
    options: dict[str, int], local: int, replicas: Replicas
) -> None:
    group = Topology(64, "cuda", local_world_size=8).sharding_group(16, **options)  # type: ignore[arg-type]
    assert (group.world_size, group.local_world_size, group.replicas) == (16, local, replicas)
    assert Topology.from_data(group.to_data()) == group


def test_rank_of_a_group_has_the_memory_of_its_least_replica() -> None:
    caps = [10, 20, 30, 5]
    topology = Topology(4, "cpu", ddr_cap=caps)
    assert topology.sharding_group(2).memory_bytes["ddr"] == (10, 5)
    assert topology.sharding_group(2, use_inter_host_allreduce=True).memory_bytes["ddr"] == (10, 5)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: RankGrid(6, 4, 6),
            r"6 ranks do not divide into sharding groups of 4 .*Possible: 1, 2, 3, 6",
        ),
        (lambda: RankGrid(6, 0, 6), "sharding_group_size must be an integer from 1, got 0"),
        (lambda: Topology(8, "cpu").sharding_group(4, node_group_size=3), "does not divide into hosts of 3"),
        (lambda: Topology(8, "cpu").sharding_group(4).sharding_group(2), "of a sharding group already"),
        (lambda: Replicas(2, 0), "sync_every must be an integer from 1, got 0"),
        (lambda: Replicas(2, 1, 3), "local_replicas is 3: 2 sharding groups have no more replicas"),
    ],
)
def test_what_does_not_divide_is_refused(call: object, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        call()  # type: ignore[operator]
