"""The options that a mixed-integer program needs for plans within a time, and what there is to place of each.

Legend: W ranks, D dimensions (time, then memory tiers).
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from attrs import frozen

from shardwright.planning.options import FREE, NO_GANG, Bools, Floats, Ints
from shardwright.planning.space import SearchSpace


@frozen(eq=False, slots=False)
class Candidates:
    """The options of plans that take no more than a time.

    Args:
        space: options and costs.
        limit_ms: the time.
    """

    space: SearchSpace
    limit_ms: float

    @property
    def is_empty(self) -> bool:
        """Whether some table has no option that is as fast."""
        return not np.logical_or.reduceat(self._can, self.space.options.first_option[:-1]).all()

    @cached_property
    def _can(self) -> Bools:
        return self.space.fits_alone & (self.space.largest_cost_ms <= self.limit_ms)

    def options(self) -> list[int]:
        """The options that plans as fast may need."""
        can, kept = self._can, list[int]()
        for table in range(len(self.space.options.tables)):
            mine = [option for option in self.space.options.of_table(table) if can[option]]
            beaten = self._beaten(mine)
            kept += [option for option in mine if option not in beaten]
        return kept

    def _beaten(self, options: list[int]) -> set[int]:
        """The options that another may take the place of in any plan.

        Its shards go where this one's are, or it is one shard that goes where any of this one's is; and it takes no
        more. Of two that are equal, the first one stays.
        """
        needs, alike = {option: self._needs(option) for option in options}, dict[bytes, list[int]]()
        for option in options:
            alike.setdefault(self.space.options.places_of(option), []).append(option)
        singles = [option for option in options if self._is_single(option)]
        found = {option for some in alike.values() for option in _beaten_alike(some, needs)}
        if singles:
            least = np.stack([needs[option][0] for option in singles])
            others = set(options).difference(singles)
            found |= {option for option in others if _is_more(needs[option], least)}
        return found

    def _is_single(self, option: int) -> bool:
        """Whether an option is one shard that may go anywhere."""
        options = self.space.options
        runs = options.shards_of(option)
        return bool(
            runs.stop - runs.start == 1
            and options.rank[runs.start] == FREE
            and options.gang[runs.start] == NO_GANG
            and options.count[runs.start] == 1
        )

    def _needs(self, option: int) -> Floats:
        runs = self.space.options.shards_of(option)
        return np.column_stack([self.space.cost_ms[runs], self.space.memory_bytes[runs]])

    def least_columns(self) -> float:
        """No fewer columns are needed, whichever options are left: known without comparing them."""
        options, world_size = self.space.options, len(self.space.capacity_bytes)
        alone = (options.rank == FREE) & (options.gang == NO_GANG)
        each = 1 + world_size * np.bincount(options.option[alone], minlength=options.num_options)
        least = np.minimum.reduceat(np.where(self._can, each, np.inf), options.first_option[:-1])
        return float(least[np.isfinite(least)].sum())

    def num_columns(self, options: list[int]) -> int:
        """How many columns the program of some options has."""
        topology, total = self.space.topology, 0
        for option in options:
            alone, gangs = self.what_moves(option)
            inside = sum(local == FREE for members in gangs for local, _ in members)
            total += 1 + topology.world_size * (len(alone) + inside) + topology.num_hosts * len(gangs)
        return total

    def what_moves(self, option: int) -> tuple[list[Ints], list[list[tuple[int, Ints]]]]:
        """The free shards of each run of shards alone, and for each gang its runs: first local rank, and shards."""
        options, alone, gangs = self.space.options, list[Ints](), dict[int, list[tuple[int, Ints]]]()
        runs, at = options.shards_of(option), 0
        for run in range(runs.start, runs.stop):
            if options.rank[run] != FREE:
                continue
            shards = np.arange(at, at + int(options.count[run]))
            at += len(shards)
            if options.gang[run] == NO_GANG:
                alone.append(shards)
            else:
                gangs.setdefault(int(options.gang[run]), []).append((int(options.local_rank[run]), shards))
        return alone, list(gangs.values())

    def free_needs(self, option: int) -> tuple[Floats, dict[int, Floats]]:
        """What each free shard needs, ``[N, D]``; and what those that have a rank need, by rank."""
        options, fixed = self.space.options, dict[int, Floats]()
        runs = options.shards_of(option)
        needs, free = self._needs(option), options.rank[runs] == FREE
        for run in np.flatnonzero(~free).tolist():
            start = int(options.rank[runs.start + run])
            for rank in range(start, start + int(options.count[runs.start + run])):
                fixed[rank] = fixed.get(rank, 0.0) + needs[run]
        return np.repeat(needs[free], options.count[runs][free], axis=0), fixed


def _beaten_alike(options: list[int], needs: dict[int, Floats]) -> list[int]:
    """Of options whose shards may be placed alike, those of which another takes no more of anything."""
    taken = np.stack([needs[option].reshape(-1) for option in options])
    no_more = (taken[:, None] <= taken[None]).all(axis=2)
    is_beaten = no_more & (~no_more.T | np.tri(len(options), k=-1, dtype=bool).T)
    return [options[index] for index in np.flatnonzero(is_beaten.any(axis=0)).tolist()]


def _is_more(needs: Floats, least: Floats) -> bool:
    """Whether some shard, of ``[N, D]``, takes no less than one of some others, ``[K, D]``."""
    return bool((least[:, None] <= needs[None]).all(axis=2).any())
