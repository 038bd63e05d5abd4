"""What passes between proposers, partitioners and the search: proposed shards, misfits, feedback."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import Factory, frozen

from shardwright.planning.options import FREE, NO_GANG, Bools, Floats, Ints

if TYPE_CHECKING:
    from shardwright.planning.space import SearchSpace


@frozen(eq=False)
class ProposedShards:
    """The shards of a proposal as columns over ``N`` shards, ``W`` ranks and ``M`` memory tiers.

    Args:
        shard: index into the shards of all options: ``[N]``.
        table: the table it belongs to: ``[N]``.
        cost_ms: what it adds to its rank's time: ``[N]``.
        memory_bytes: what it takes of each tier: ``[N, M]``.
        rank: the rank it must live on, or ``FREE``: ``[N]``.
        tiers: the names of the tiers.
        capacity_bytes: what each rank has: ``[W, M]``.
        gang: shards of one number must go to ranks of one host; ``NO_GANG``: no other shard matters. ``[N]``; by
            default there are no gangs.
        local_rank: the rank inside its host that a shard of a gang must have, or ``FREE``: ``[N]``.
        local_world_size: ranks of one host, neighbours; by default all.
    """

    shard: Ints
    table: Ints
    cost_ms: Floats
    memory_bytes: Ints
    rank: Ints
    tiers: tuple[str, ...]
    capacity_bytes: Ints
    gang: Ints = Factory(lambda self: np.full(len(self.rank), NO_GANG), takes_self=True)
    local_rank: Ints = Factory(lambda self: np.full(len(self.rank), FREE), takes_self=True)
    local_world_size: int = Factory(lambda self: len(self.capacity_bytes), takes_self=True)

    @property
    def world_size(self) -> int:
        """``W``."""
        return len(self.capacity_bytes)

    @property
    def num_hosts(self) -> int:
        """How many hosts the ranks are on."""
        return self.world_size // self.local_world_size

    def ranks_of(self, host: int) -> range:
        """The ranks of a host."""
        return range(host * self.local_world_size, (host + 1) * self.local_world_size)

    def loads_ms(self, ranks: Ints) -> Floats:
        """Each rank's time when the shards live on ``ranks``: ``[W]``."""
        loads: Floats = np.zeros(self.world_size)
        np.add.at(loads, ranks, self.cost_ms)
        return loads

    def used_bytes(self, ranks: Ints) -> Ints:
        """What each rank holds of each tier when the shards live on ``ranks``: ``[W, M]``."""
        used = np.zeros_like(self.capacity_bytes)
        np.add.at(used, ranks, self.memory_bytes)
        return used

    @property
    def is_fixed(self) -> Bools:
        """Which shards must live on a given rank: ``[N]``."""
        return np.not_equal(self.rank, FREE)

    def misfit(self, shard: int, used_bytes: Ints, *, host: int | None = None) -> Misfit:
        """Why a free shard fits on no rank, or a shard of a gang on no rank of a host where it may be.

        Args:
            shard: its position among these.
            used_bytes: what the ranks hold without it: ``[W, M]``. Where it is of a gang, those of ``host`` also
                hold what was placed of the gang before it.
            host: the host that came nearest to having room for the gang.
        """
        free = self.capacity_bytes - used_bytes
        short = self.memory_bytes[shard] - free
        ranks = np.arange(self.world_size) if host is None else np.array(self.ranks_of(host))
        if self.local_rank[shard] != FREE:
            ranks = ranks[ranks % self.local_world_size == self.local_rank[shard]]
        rank = int(ranks[np.argmin(short[ranks].max(axis=1))])
        tier = int(np.argmax(short[rank]))
        return self._misfit(shard, rank, tier, self.memory_bytes[shard, tier], free[rank, tier])

    def fixed_misfit(self) -> Misfit | None:
        """Why the shards that have a rank do not fit there together, if they do not."""
        fixed = np.flatnonzero(self.is_fixed)
        used = np.zeros_like(self.capacity_bytes)
        np.add.at(used, self.rank[fixed], self.memory_bytes[fixed])
        over = used - self.capacity_bytes
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


@frozen
class Misfit:
    """Which shard did not fit where, and why.

    Args:
        table: index of its table.
        shard: its position among the shards of the proposal; the largest of those that must live on ``rank``,
            where these do not fit together.
        rank: the rank that came nearest to having room, or the one it must live on.
        is_fixed: whether it must live there.
        tier: the memory tier that is short.
        needed_bytes: what the shard needs of it; where ``is_fixed``, what all that must live on ``rank``
            need.
        free_bytes: what is left of it on ``rank``, for that.
        capacity_bytes: what ``rank`` has of it.
        gang_size: how many shards, it among them, had to go to one host; 1 for a shard on its own.
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
        """How many bytes were missing."""
        return self.needed_bytes - self.free_bytes


@frozen(eq=False)
class Feedback:
    """What became of a proposal.

    Args:
        ranks: where its shards went, in the order of tables and shards: ``[N]``; ``None`` if they did not
            fit.
        load_ms: time of each rank: ``[W]``; ``None`` if they did not fit.
        used_bytes: memory used on each rank: ``[W, M]``; ``None`` if they did not fit.
        value_ms: the objective, the largest rank's time; infinite if they did not fit.
        misfit: which shard did not fit, and where.
    """

    ranks: Ints | None = None
    load_ms: Floats | None = None
    used_bytes: Ints | None = None
    value_ms: float = float("inf")
    misfit: Misfit | None = None


def propose(space: SearchSpace, proposal: Ints) -> ProposedShards:
    """The shards of a proposal, gathered from the columns of all options.

    Args:
        space: options and costs.
        proposal: one option for each table: ``[T]``.
    """
    options = space.options
    starts, stops = options.first_shard[proposal], options.first_shard[proposal + 1]
    counts = stops - starts
    before = np.cumsum(counts) - counts
    shard = np.repeat(starts - before, counts) + np.arange(counts.sum(), dtype=np.int64)
    return ProposedShards(
        shard=shard,
        table=np.repeat(np.arange(len(proposal), dtype=np.int64), counts),
        cost_ms=space.cost_ms[shard],
        memory_bytes=space.memory_bytes[shard],
        rank=options.rank[shard],
        tiers=space.tiers,
        capacity_bytes=space.capacity_bytes,
        gang=options.gang[shard],
        local_rank=options.local_rank[shard],
        local_world_size=space.topology.local_world_size,
    )
