"""Conformance tests of partitioners.

Legend: N shards, W ranks, M memory tiers.
"""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.contracts import Partitioner
from shardwright.errors import UnknownPluginError
from shardwright.planning.arrays import FREE, NO_GANG, Ints
from shardwright.planning.search.placement import Misfit, ProposedShards
from shardwright_testing.equality.random_cases import LAWS, Cluster, clusters, run_drawn

_TIERS = ("hbm", "ddr")
_PLACEMENTS = settings(LAWS, max_examples=50)


class PartitionerTests:
    """The tests of a partitioner: give the fixture ``partitioner``, an instance."""

    def test_placements_keep_to_capacities_ranks_and_hosts(self, partitioner: Partitioner) -> None:
        """No rank holds more than it has, fixed shards stay, gangs share a host; or it says what did not fit."""

        @_PLACEMENTS
        @given(proposed_shards())
        def check(shards: ProposedShards) -> None:
            placed = _place(partitioner, shards)
            if isinstance(placed, Misfit):
                _check_misfit(partitioner, shards, placed)
            else:
                _check_placement(partitioner, shards, placed)

        check()

    def test_what_fits_anywhere_is_placed(self, partitioner: Partitioner) -> None:
        """Shards are placed if every rank could hold everything."""

        @_PLACEMENTS
        @given(proposed_shards())
        def check(shards: ProposedShards) -> None:
            room = np.full_like(
                shards.capacity_bytes, shards.fixed_bytes.sum() + shards.memory_bytes.sum() + 1
            )
            placed = _place(partitioner, attrs.evolve(shards, capacity_bytes=room))
            assert not isinstance(placed, Misfit), (
                f"{partitioner.name}: gives up ({placed}), although every rank has room for all {len(shards)} shards"
            )

        check()

    def test_what_fits_nowhere_is_told(self, partitioner: Partitioner) -> None:
        """One shard that is larger than any rank."""
        for cluster in (Cluster(1, 1), Cluster(2, 2)):
            shards = _shards(cluster, [(1.0, (100, 0), FREE)], capacity=(10, 10))
            placed = _place(partitioner, shards)
            assert isinstance(placed, Misfit), (
                f"{partitioner.name}: places a shard of 100 bytes on a rank that has 10, as {placed}"
            )
            _check_misfit(partitioner, shards, placed)

    def test_placements_are_the_same_each_time(self, partitioner: Partitioner) -> None:
        """And the shards are left unchanged."""

        @_PLACEMENTS
        @given(proposed_shards())
        def check(shards: ProposedShards) -> None:
            before = {name: value.copy() for name, value in _arrays(shards).items()}
            results = [_place(partitioner, shards) for _ in range(3)]
            for name, value in _arrays(shards).items():
                assert np.array_equal(value, before[name]), f"{partitioner.name}: changes the shards' {name}"
            for again in results[1:]:
                same = (
                    again == results[0]
                    if isinstance(again, Misfit) or isinstance(results[0], Misfit)
                    else np.array_equal(again, results[0])
                )
                assert same, (
                    f"{partitioner.name}: is not deterministic: {results[0]}, and {again} when it is asked again"
                )

        run_drawn(check)


@st.composite
def proposed_shards(draw: st.DrawFn) -> ProposedShards:
    """Shards, free, fixed and in gangs, on ranks of which some have less room or speed than others."""
    cluster = draw(clusters(most_hosts=2, most_local=3))
    fixed = st.integers(0, cluster.world_size - 1)
    sizes = st.tuples(st.integers(0, 40), st.integers(0, 40))
    rank = st.just(FREE) | st.just(FREE) | fixed
    rows = draw(st.lists(st.tuples(st.floats(0, 10), sizes, rank), max_size=8))
    gangs = [
        [
            (cost, size)
            for cost, size in draw(st.lists(st.tuples(st.floats(0, 10), sizes), min_size=1, max_size=3))
        ]
        for _ in range(draw(st.integers(0, 2)))
    ]
    shards = _shards(cluster, rows, capacity=draw(st.tuples(st.integers(30, 200), st.integers(30, 200))))
    seed = draw(st.integers(0, 100))
    placed = _with_gangs(shards, cluster, gangs, are_pinned=draw(st.booleans()))
    return _with_speeds(_with_room(placed, seed), seed, num_classes=draw(st.integers(1, 3)))


def _shards(
    cluster: Cluster, rows: list[tuple[float, tuple[int, int], int]], *, capacity: tuple[int, int]
) -> ProposedShards:
    count, ranks = len(rows), cluster.world_size
    return ProposedShards(
        shard=np.arange(count),
        table=np.arange(count),
        cost_ms=np.array([cost for cost, _, _ in rows], dtype=np.float64),
        memory_bytes=np.array([size for _, size, _ in rows], dtype=np.int64).reshape(count, 2),
        tiers=_TIERS,
        capacity_bytes=np.tile(np.array(capacity, dtype=np.int64), (ranks, 1)),
        rank=np.array([rank for _, _, rank in rows], dtype=np.int64),
        local_world_size=cluster.local_world_size,
    )


def _with_gangs(
    shards: ProposedShards,
    cluster: Cluster,
    gangs: list[list[tuple[float, tuple[int, int]]]],
    *,
    are_pinned: bool,
) -> ProposedShards:
    """Add gangs, shards that must share a host; pinned, each has its rank inside it."""
    added = [(number, place, *one) for number, gang in enumerate(gangs) for place, one in enumerate(gang)]
    if not added:
        return shards
    count = len(shards) + len(added)
    locals_ = [place % cluster.local_world_size if are_pinned else FREE for _, place, _, _ in added]
    sizes = np.array([size for *_, size in added], dtype=np.int64)
    cost_ms = np.append(shards.cost_ms, [cost for _, _, cost, _ in added])
    return attrs.evolve(
        shards,
        shard=np.arange(count),
        table=np.arange(count),
        cost_ms=cost_ms,
        class_ms=cost_ms[:, None],
        memory_bytes=np.concatenate([shards.memory_bytes, sizes]),
        rank=np.append(shards.rank, np.full(len(added), FREE)),
        gang=np.append(shards.gang, [number for number, *_ in added]),
        local_rank=np.append(np.full(len(shards), FREE), locals_),
    )


def _with_room(shards: ProposedShards, seed: int) -> ProposedShards:
    """Fill a part of each rank beforehand."""
    random = np.random.default_rng(seed)
    taken = (shards.capacity_bytes * random.uniform(0, 0.5, shards.capacity_bytes.shape)).astype(np.int64)
    return attrs.evolve(shards, fixed_bytes=taken, fixed_ms=random.uniform(0, 5, shards.world_size))


def _with_speeds(shards: ProposedShards, seed: int, *, num_classes: int) -> ProposedShards:
    """Deal ranks to classes of speed, on each of which shards take other times."""
    random = np.random.default_rng(seed)
    rank_class = np.append(num_classes - 1, random.integers(num_classes, size=shards.world_size - 1))
    class_ms = shards.cost_ms[:, None] * random.uniform(0.5, 2, (len(shards), num_classes))
    return attrs.evolve(
        shards,
        cost_ms=class_ms[:, rank_class].mean(axis=1),
        class_ms=class_ms,
        rank_class=rank_class.astype(np.int64),
    )


def _arrays(shards: ProposedShards) -> dict[str, Ints]:
    fields = ((field.name, getattr(shards, field.name)) for field in attrs.fields(ProposedShards))
    return {name: value for name, value in fields if isinstance(value, np.ndarray)}


def _place(partitioner: Partitioner, shards: ProposedShards) -> Ints | Misfit:
    try:
        placed = partitioner.place(shards)
    except UnknownPluginError as error:
        pytest.skip(f"{partitioner.name} cannot work here: {error}")
    return placed if isinstance(placed, Misfit) else np.asarray(placed)


def _check_placement(partitioner: Partitioner, shards: ProposedShards, ranks: Ints) -> None:
    who, local = partitioner.name, shards.local_world_size
    assert ranks.shape == (len(shards),), f"{who}: {ranks.shape} ranks for {len(shards)} shards"
    outside = np.flatnonzero((ranks < 0) | (ranks >= shards.world_size))
    assert not len(outside), (
        f"{who}: shard {outside[:1]} is on rank {ranks[outside[:1]]} of {shards.world_size}"
    )
    moved = np.flatnonzero(shards.is_fixed & (ranks != shards.rank))
    assert not len(moved), (
        f"{who}: shard {moved[:1]} must live on rank {shards.rank[moved[:1]]}, it is on {ranks[moved[:1]]}"
    )
    strayed = np.flatnonzero((shards.local_rank != FREE) & (ranks % local != shards.local_rank))
    assert not len(strayed), (
        f"{who}: shard {strayed[:1]} must have rank {shards.local_rank[strayed[:1]]} of its host, it is on "
        f"{ranks[strayed[:1]]}, with {local} ranks a host"
    )
    for gang in np.unique(shards.gang[shards.gang != NO_GANG]):
        hosts = set((ranks[shards.gang == gang] // local).tolist())
        assert len(hosts) == 1, f"{who}: the shards of gang {gang} are on hosts {sorted(hosts)}, not on one"
    _check_capacity(who, shards, ranks)


def _check_capacity(who: str, shards: ProposedShards, ranks: Ints) -> None:
    used = shards.used_bytes(ranks)
    for rank, tier in np.argwhere(used > shards.capacity_bytes)[:1]:
        raise AssertionError(
            f"{who}: rank {rank} is over its capacity: it was given {used[rank, tier]} bytes of {shards.tiers[tier]}, "
            f"it has {shards.capacity_bytes[rank, tier]}"
        )


def _check_misfit(partitioner: Partitioner, shards: ProposedShards, misfit: Misfit) -> None:
    """A misfit names a shard and a rank that there are, and numbers that say why."""
    who = f"{partitioner.name}: the misfit {misfit}"
    assert 0 <= misfit.shard < len(shards), f"{who} names no shard of {len(shards)}"
    assert misfit.table == shards.table[misfit.shard], f"{who} names another table than its shard's"
    assert 0 <= misfit.rank < shards.world_size, f"{who} names no rank of {shards.world_size}"
    assert misfit.tier in shards.tiers, f"{who} names no memory tier of {', '.join(shards.tiers)}"
    capacity = shards.capacity_bytes[misfit.rank, shards.tiers.index(misfit.tier)]
    assert misfit.capacity_bytes == capacity, f"{who}: the rank has {capacity} bytes"
    assert misfit.needed_bytes > misfit.free_bytes, (
        f"{who} does not say why: {misfit.needed_bytes} bytes are needed and {misfit.free_bytes} are free"
    )
