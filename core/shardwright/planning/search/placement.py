"""Messages of proposers, partitioners and the search: proposed and placed shards, claims of bounds, misfits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import Factory, evolve, field, frozen

from shardwright.arguments import typed
from shardwright.planning.arrays import FREE, NO_GANG, Bools, Floats, Ints, without

if TYPE_CHECKING:
    from shardwright.planning.options.search_space import SearchSpace


@frozen(eq=False)
class ProposedShards:
    """The shards of a proposal that are to be placed, as columns over ``N`` shards, ``W`` ranks and ``M`` memory tiers.

    Shards that live on given ranks by their layout need not be among them: ``fixed_ms`` and ``fixed_bytes`` say what
    they take.

    Args:
        shard: the run of equal shards it is of: ``[N]``.
        table: the table it belongs to, of all tables: ``[N]``.
        cost_ms: time that it adds to its rank, ms, the mean over ranks: ``[N]``.
        memory_bytes: bytes that it takes of each tier: ``[N, M]``.
        tiers: the names of the tiers.
        capacity_bytes: bytes of each tier that each rank has: ``[W, M]``.
        rank: the rank that a shard must live on all the same, or ``FREE``: ``[N]``; by default all are free.
        fixed_ms: time that each rank has already, of shards that are not among these: ``[W]``; none by default.
        fixed_bytes: memory taken on each rank already, by the same: ``[W, M]``; none by default.
        gang: shards of one number must go to ranks of one host; ``NO_GANG``: no other shard matters. ``[N]``; by
            default there are no gangs.
        local_rank: the rank inside its host that a shard of a gang must have, or ``FREE``: ``[N]``.
        local_world_size: ranks of one host, neighbours; by default all.
        class_ms: time that it adds to a rank of each of ``C`` classes of ranks of one speed, ms: ``[N, C]``; by default
            there is one class, and this is ``cost_ms``.
        rank_class: the class of each rank: ``[W]``.
    """

    shard: Ints
    table: Ints
    cost_ms: Floats
    memory_bytes: Ints
    tiers: tuple[str, ...]
    capacity_bytes: Ints
    rank: Ints = Factory(lambda self: np.full(len(self.table), FREE), takes_self=True)
    fixed_ms: Floats = Factory(lambda self: np.zeros(len(self.capacity_bytes)), takes_self=True)
    fixed_bytes: Ints = Factory(lambda self: np.zeros_like(self.capacity_bytes), takes_self=True)
    gang: Ints = Factory(lambda self: np.full(len(self.table), NO_GANG), takes_self=True)
    local_rank: Ints = Factory(lambda self: np.full(len(self.table), FREE), takes_self=True)
    local_world_size: int = Factory(lambda self: len(self.capacity_bytes), takes_self=True)
    _class_ms: Floats | None = None
    rank_class: Ints = Factory(
        lambda self: np.zeros(len(self.capacity_bytes), dtype=np.int64), takes_self=True
    )

    def __len__(self) -> int:
        """``N``."""
        return len(self.table)

    @property
    def world_size(self) -> int:
        """``W``."""
        return len(self.capacity_bytes)

    @property
    def class_ms(self) -> Floats:
        """Time that each adds to a rank of each class, ms: ``[N, C]``."""
        return self.cost_ms[:, None] if self._class_ms is None else self._class_ms

    def only(self, kept: Bools | Ints) -> ProposedShards:
        """Some of the shards, on the same ranks; ``kept`` is a mask or indices."""
        columns = ("shard", "table", "cost_ms", "memory_bytes", "rank", "gang", "local_rank")
        class_ms = None if self._class_ms is None else self._class_ms[kept]
        return evolve(self, class_ms=class_ms, **{name: getattr(self, name)[kept] for name in columns})

    @property
    def num_hosts(self) -> int:
        """Number of hosts that the ranks are on."""
        return self.world_size // self.local_world_size

    def ranks_of(self, host: int) -> range:
        """The ranks of a host."""
        return range(host * self.local_world_size, (host + 1) * self.local_world_size)

    def loads_ms(self, ranks: Ints) -> Floats:
        """Each rank's time when the shards live on ``ranks``: ``[W]``."""
        loads: Floats = self.fixed_ms + np.bincount(
            ranks,
            weights=self.class_ms[np.arange(len(self)), self.rank_class[ranks]],
            minlength=self.world_size,
        )
        return loads

    def used_bytes(self, ranks: Ints) -> Ints:
        """Compute the bytes on each rank, by tier, when the shards live on ``ranks``: ``[W, M]``."""
        used = self.fixed_bytes.copy()
        np.add.at(used, ranks, self.memory_bytes)
        return used

    @property
    def is_fixed(self) -> Bools:
        """True for shards that must live on a given rank: ``[N]``."""
        return np.not_equal(self.rank, FREE)

    def misfit(self, shard: int, used_bytes: Ints, *, host: int | None = None) -> Misfit:
        """Explain why a free shard fits on no rank, or a shard of a gang on no rank of a host where it may be.

        Args:
            shard: its position among these.
            used_bytes: bytes on the ranks without it: ``[W, M]``. Where it is of a gang, those of ``host`` also hold
                what was placed of the gang before it.
            host: the host that came nearest to having room for the gang.
        """
        free = self.capacity_bytes - used_bytes
        short = self.memory_bytes[shard] - free
        ranks = np.arange(self.world_size) if host is None else np.array(self.ranks_of(host))
        if self.local_rank[shard] != FREE:
            ranks = ranks[ranks % self.local_world_size == self.local_rank[shard]]
        # The nearest rank is the one whose largest shortage of a tier is least.
        rank = int(ranks[np.argmin(short[ranks].max(axis=1))])
        tier = int(np.argmax(short[rank]))
        return self._misfit(shard, rank, tier, self.memory_bytes[shard, tier], free[rank, tier])

    def fixed_misfit(self) -> Misfit | None:
        """Explain why the shards among these that have a rank do not fit there together, if they do not."""
        fixed = np.flatnonzero(self.is_fixed)
        used = self.fixed_bytes.copy()
        np.add.at(used, self.rank[fixed], self.memory_bytes[fixed])
        over = used - self.capacity_bytes
        # A rank without such a shard is not over its limit because of one.
        over[without(np.arange(len(over)), self.rank[fixed])] = 0
        rank, tier = (int(index) for index in np.unravel_index(np.argmax(over), over.shape))
        if over[rank, tier] <= 0:
            return None
        here = np.flatnonzero(self.rank == rank)
        shard = int(here[np.argmax(self.memory_bytes[here, tier])])
        return self._misfit(shard, rank, tier, used[rank, tier], self.capacity_bytes[rank, tier])

    def _misfit(self, shard: int, rank: int, tier: int, needed_bytes: int, free_bytes: int) -> Misfit:
        return Misfit(
            table=int(self.table[shard]),
            shard=shard,
            rank=rank,
            is_fixed=bool(self.rank[shard] != FREE),
            gang_size=1 if self.gang[shard] == NO_GANG else int((self.gang == self.gang[shard]).sum()),
            tier=self.tiers[tier],
            needed_bytes=int(needed_bytes),
            free_bytes=int(free_bytes),
            capacity_bytes=int(self.capacity_bytes[rank, tier]),
        )


@frozen(eq=False)
class Placed:
    """A proposal that brings its placement, so that no partitioner is asked.

    Args:
        proposal: the option of each of all tables: ``[A]``.
        ranks: ranks of its shards that have none by their layout, in the order of tables and shards: ``[N]``.
    """

    proposal: Ints
    ranks: Ints

    @classmethod
    def of(cls, space: SearchSpace, chosen: Sequence[int], ranks: Sequence[Sequence[int]]) -> Placed:
        """The options that were chosen for all tables, with the ranks of all their shards.

        Args:
            space: options and costs.
            chosen: an option for each table: ``A``.
            ranks: ranks of the shards of each table, in the order of its layout's blocks.
        """
        is_free = space.options.rank == FREE
        free = [
            np.array(own, dtype=np.int64)[space.options.spread(is_free, option)]
            for option, own in zip(chosen, ranks, strict=True)
        ]
        return cls(np.array(chosen, dtype=np.int64), np.concatenate(free))


@frozen(eq=False, field_transformer=typed)
class Proven:
    """Claim that no plan's largest rank takes less than a time, and its proof.

    Args:
        bound_ms: the time, ms.
        certificate: the proof, JSON data: ``{"z_ms": time, ...}`` in the language of
            :mod:`shardwright.planning.proofs`, which goes through it before it is believed.

    Raises:
        InvalidInputError: the time is no number, or the proof no mapping.
    """

    bound_ms: float = 0.0
    certificate: Mapping[str, Any] = field(factory=dict)


@frozen
class Misfit:
    """Shard that did not fit, its rank, and the memory that was short.

    Args:
        table: index of its table, of all tables; the one with the largest shard of those that must live on
            ``rank``, where these do not fit together.
        shard: its position among the shards to be placed; -1 if it lives on ``rank`` by its layout.
        rank: the rank that came nearest to having room, or the one it must live on.
        is_fixed: true if it must live there.
        tier: the memory tier that is short.
        needed_bytes: bytes that the shard needs of it; where ``is_fixed``, that all shards that must live on ``rank``
            need.
        free_bytes: bytes that are left of it on ``rank``, for that.
        capacity_bytes: bytes that ``rank`` has of it.
        gang_size: number of shards, it among them, that had to go to one host; 1 for a shard on its own.
    """

    table: int
    shard: int
    rank: int
    is_fixed: bool
    tier: str
    needed_bytes: int
    free_bytes: int
    capacity_bytes: int
    gang_size: int = 1

    @property
    def short_bytes(self) -> int:
        """Number of bytes that were missing."""
        return self.needed_bytes - self.free_bytes


def chosen_runs(space: SearchSpace, proposal: Ints) -> tuple[Ints, Ints]:
    """The ``K`` runs of the options that a proposal ``[A]`` chooses, in the order of tables and shards.

    Returns:
        The index of each among the runs of all options ``[K]``, and that of its table among all tables ``[K]``.
    """
    first = space.options.first_shard
    counts = first[proposal + 1] - first[proposal]
    table = np.repeat(np.arange(len(proposal), dtype=np.int64), counts)
    return _spread(first[proposal], counts), table


def _spread(starts: Ints, counts: Ints) -> Ints:
    """``starts[i], starts[i] + 1, ...``, ``counts[i]`` of them, one after the other."""
    # The position among all, less the elements before this start, plus the start.
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum(), dtype=np.int64)


def propose(space: SearchSpace, proposal: Ints, *, with_fixed: bool = False) -> ProposedShards:
    """The shards of a proposal, gathered from the columns of all options.

    Args:
        space: options and costs.
        proposal: one option for each of all tables: ``[A]``.
        with_fixed: shards that live on given ranks by their layout are among them too, with their ``rank``; else
            there is only the sum of what they take.
    """
    options, (runs, tables) = space.options, chosen_runs(space, proposal)
    fixed = options.rank[runs] != FREE
    fixed_ms, fixed_bytes = fixed_loads(space, runs[fixed & (not with_fixed)])
    kept = ~fixed | with_fixed
    run, table = runs[kept], tables[kept]
    count = options.count[run]
    shard = np.repeat(run, count)
    place = _spread(np.zeros_like(count), count)  # of each shard in its run
    # Alike tables have the gangs of one option: numbers that no other table has.
    gang = options.gang[run] + table * (options.gang.max() + 1)
    rank, local = options.rank[shard], options.local_rank[shard]
    return ProposedShards(
        shard=shard,
        table=np.repeat(table, count),
        cost_ms=space.cost_ms[shard],
        memory_bytes=space.memory_bytes[shard],
        tiers=space.tiers,
        capacity_bytes=space.capacity_bytes,
        rank=np.where(rank == FREE, FREE, rank + place),
        fixed_ms=fixed_ms,
        fixed_bytes=fixed_bytes,
        gang=np.repeat(np.where(options.gang[run] == NO_GANG, NO_GANG, gang), count),
        local_rank=np.where(local == FREE, FREE, local + place),
        local_world_size=space.topology.local_world_size,
        class_ms=space.class_ms[shard] if len(space.topology.classes) > 1 else None,
        rank_class=space.topology.rank_class,
    )


def fixed_loads(
    space: SearchSpace, runs: Ints, *, cost_ms: Floats | Ints | None = None
) -> tuple[Floats, Ints]:
    """Time and memory on each rank of runs whose shards must live on given ranks: ``[W]``, ``[W, M]``.

    Runs over the same ranks are added first, so that the work does not grow with the number of ranks.

    Args:
        space: options and costs.
        runs: indices of runs.
        cost_ms: the time of each shard of all runs, if not that of all phases: ``[S]``, or by class ``[S, C]``.
    """
    loads, used = np.zeros(len(space.capacity_bytes)), np.zeros_like(space.capacity_bytes)
    first, count = space.options.rank[runs], space.options.count[runs]
    # (first rank, count) as one number: runs over the same ranks have one.
    _, leader, place = np.unique(first * (len(loads) + 1) + count, return_index=True, return_inverse=True)
    times = space.class_ms if cost_ms is None else cost_ms
    cost = np.bincount(place, weights=space.on_ranks(times[runs], first), minlength=len(leader))
    memory = np.zeros((len(leader), used.shape[1]), dtype=np.int64)
    np.add.at(memory, place, space.memory_bytes[runs])
    for index, run in enumerate(leader.tolist()):
        ranks = slice(int(first[run]), int(first[run] + count[run]))
        loads[ranks] += cost[index]
        used[ranks] += memory[index]
    return loads, used


def fixed_misfit(space: SearchSpace, proposal: Ints, shards: ProposedShards) -> Misfit | None:
    """Explain why the shards that must live on given ranks do not fit there together, if they do not."""
    over = shards.fixed_bytes - shards.capacity_bytes
    rank, tier = (int(index) for index in np.unravel_index(np.argmax(over), over.shape))
    if over[rank, tier] <= 0:
        return None
    options, (runs, tables) = space.options, chosen_runs(space, proposal)
    first = options.rank[runs]
    here = (first != FREE) & (first <= rank) & (rank < first + options.count[runs])
    # Of the runs that have a shard on this rank, the one with the largest.
    largest = int(np.argmax(np.where(here, space.memory_bytes[runs, tier], -1)))
    return Misfit(
        table=int(tables[largest]),
        shard=-1,
        rank=rank,
        is_fixed=True,
        tier=space.tiers[tier],
        needed_bytes=int(shards.fixed_bytes[rank, tier]),
        free_bytes=int(shards.capacity_bytes[rank, tier]),
        capacity_bytes=int(shards.capacity_bytes[rank, tier]),
    )
