"""One dive: ranks given to patterns, one after the other, as long as the program of the rest says that it can be.

This is price and dive (Sadykov, Vanderbeck, Pessoa, Tahiri and Uchoa, Primal heuristics for branch and price, 2019):
the pattern of which the program uses most is given a rank, what it holds is placed, and the program of the rest is
solved again with patterns made for the rest. Where that needs more ranks than are left, the last choices are taken
back, more of them each time. Gangs are given hosts first, by the same program.

Legend: K kinds of shards, O' options, G groups of ranks, W ranks of hosts of L, D dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from attrs import define, field, frozen

from shardwright.planning.options import FREE, Bools, Floats, Ints
from shardwright.planning.space import SearchSpace
from shardwright_plugins.proposers._dive_program import ZERO, DiveProgram, Fractions, Group
from shardwright_plugins.proposers._pattern_program import Kinds

# A pattern that is used so often is one in whole numbers; a gang of which the program has so much is given a host.
_WHOLE, _HALF = 1e-6, 0.5
# What chance adds to the use of a pattern at most.
_NOISE = 0.5
# How often choices of one dive are taken back.
_MOST_RETREATS = 12


@frozen(eq=False)
class Gang:
    """The gangs of one kind.

    Args:
        size: how many shards each has.
        has_places: whether each has one shard on each rank of its host.
    """

    size: int
    has_places: bool


def gangs_of(space: SearchSpace, kinds: Kinds) -> Mapping[int, Gang] | None:
    """The gangs of each kind; ``None`` where some have places on a part of a host.

    Args:
        space: the options.
        kinds: of their shards.
    """
    options, local = space.options, space.topology.local_world_size
    found: dict[int, Gang] = {}
    if local == 1:
        return found
    for kind in np.flatnonzero(kinds.is_gang).tolist():
        first = int(np.flatnonzero(kinds.kind_of == kind)[0])
        runs = np.flatnonzero(options.gang == options.gang[first])
        size, placed = int(options.count[runs].sum()), options.local_rank[runs] != FREE
        if placed.any() and not (placed.all() and size == local):
            return None
        found[kind] = Gang(size, bool(placed.any()))
    return found


def few_gangs(kinds: Kinds, gangs: Mapping[int, Gang]) -> Bools:
    """All options but those with gangs of tables that may lie on any rank without: ``[O']``."""
    has_gangs = (kinds.needs[list(gangs)] > 0).any(axis=0)
    is_alone = ~has_gangs & (kinds.needs > 0).any(axis=0)
    has_alone = np.zeros(int(kinds.table.max()) + 1, dtype=bool)
    has_alone[kinds.table[is_alone]] = True
    few: Bools = ~has_gangs | ~has_alone[kinds.table]
    return few


@frozen(eq=False)
class Dived:
    """Where a dive came to.

    Args:
        tables: how many tables take each option: ``[O']``.
        held: what each rank holds, gangs with places apart: rank -> shards of each kind, ``[K]``.
        hosts: the first ranks of the hosts of the gangs of each kind.
        is_whole: whether all tables are placed.
    """

    tables: Floats
    held: Mapping[int, Ints]
    hosts: Mapping[int, Sequence[int]]
    is_whole: bool


@frozen(eq=False)
class _Choice:
    """What was chosen, and how all was before.

    Args:
        program: before.
        held: likewise, by ranks.
        hosts: likewise, of gangs.
        index: of a group.
        chosen: its pattern, or where the shards of the gang are one that came to a host of it: ``[K]``.
        is_gang: which of the two.
    """

    program: DiveProgram
    held: dict[int, Ints]
    hosts: dict[int, list[int]]
    index: int
    chosen: Floats
    is_gang: bool

    def bar(self) -> DiveProgram:
        """The program before, in which it cannot be chosen again."""
        group = self.program.groups[self.index]
        if self.is_gang:
            group.most = np.where(self.chosen > 0, 0.0, group.most)
        else:
            group.bar(self.chosen)
        return self.program


@define(eq=False)
class Dive:
    """One dive.

    Args:
        kinds: of the shards.
        gangs: of each kind.
        local: ranks of a host.
        program: of all there is to place.
        random: the generator of chance; ``None`` for none.
    """

    kinds: Kinds
    gangs: Mapping[int, Gang]
    local: int
    program: DiveProgram
    random: np.random.Generator | None = None
    _held: dict[int, Ints] = field(factory=dict)
    _hosts: dict[int, list[int]] = field(factory=dict)
    _choices: list[_Choice] = field(factory=list)
    _retreats: int = 0
    _tables: Floats = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._tables = np.zeros(len(self.kinds.options))

    def run(self) -> Dived:
        """Give ranks to patterns until all are placed or the program says that it cannot be."""
        is_whole = self._settle_gangs() and self._fill()
        return Dived(self._tables, self._held, self._hosts, is_whole)

    def _solve(self) -> Fractions | None:
        found = self.program.solve()
        if found is not None:
            self._tables = found.tables
        return found

    # -- ranks --------------------------------------------------------------------------------------------------

    def _fill(self) -> bool:
        """Fix patterns; whether all is placed."""
        self._choices.clear()
        while True:
            found = self._solve()
            if found is None:
                if not self._retreat():
                    return False
            elif found.ranks <= ZERO:
                return True
            else:
                self._fix_some(found)

    def _fix_some(self, found: Fractions) -> None:
        """Fix all patterns that are used in whole numbers by tables whose options are, or else one of the others."""
        fractional = np.abs(found.tables - np.rint(found.tables)) > _WHOLE
        is_open = (self.kinds.needs[:, fractional] > 0).any(axis=1)
        whole = [
            (group, pattern, int(use + _WHOLE))
            for group in self.program.groups
            for pattern, use in zip(group.patterns, group.uses.tolist(), strict=True)
            if use >= 1 - _WHOLE and not (pattern > 0)[is_open].any()
        ]
        if not whole:
            index, pattern = self._most_used()
            self._choose(index, pattern)
            whole = [(self.program.groups[index], pattern, 1)]
        for group, pattern, number in whole:
            self._fix(group, pattern, number)

    def _choose(self, index: int, chosen: Floats, *, is_gang: bool = False) -> None:
        """Note what is chosen for a group, and how all is before."""
        hosts = {kind: list(firsts) for kind, firsts in self._hosts.items()}
        self._choices.append(_Choice(self.program.copy(), dict(self._held), hosts, index, chosen, is_gang))

    def _retreat(self) -> bool:
        """Take choices back, one more each time; the first of them is not to be made again. Whether there are any."""
        self._retreats += 1
        if not self._choices or self._retreats > _MOST_RETREATS:
            return False
        del self._choices[max(len(self._choices) - self._retreats + 1, 1) :]
        last = self._choices.pop()
        self.program, self._held, self._hosts = last.bar(), last.held, last.hosts
        return True

    def _most_used(self) -> tuple[int, Floats]:
        """The group and the pattern that the program uses most, up to chance."""
        groups = self.program.groups
        uses = np.concatenate([group.uses for group in groups])
        chance = 0.0 if self.random is None else self.random.uniform(0, _NOISE, len(uses))
        best = int(np.argmax(np.where(uses > ZERO, uses + chance, -1.0)))
        index = int(np.repeat(np.arange(len(groups)), [len(group.uses) for group in groups])[best])
        return index, np.concatenate([group.patterns for group in groups])[best]

    def _fix(self, group: Group, pattern: Floats, number: int) -> None:
        """Give so many ranks of a group a pattern, as long as there are shards for it."""
        program = self.program
        for _ in range(number):
            if not group.ranks or (pattern > np.minimum(program.most, group.most)).any():
                break
            rank = group.ranks.pop()
            self._held[rank] = self._held.get(rank, 0) + pattern.astype(np.int64)
            program.covered = program.covered + pattern
            group.most = group.most - pattern
            self._decide(np.flatnonzero(pattern))
        program.groups = [each for each in program.groups if each.ranks]

    def _decide(self, placed: Ints) -> None:
        """A table that is like no other takes an option that has the shards placed."""
        kinds, program = self.kinds, self.program
        for kind in placed.tolist():
            users = kinds.needs[kind] > 0
            tables = np.unique(kinds.table[users & program.is_allowed])
            if len(tables) == 1 and program.multiplicity[tables[0]] == 1:
                program.is_allowed = program.is_allowed & (users | (kinds.table != tables[0]))

    # -- gangs --------------------------------------------------------------------------------------------------

    def _settle_gangs(self) -> bool:
        """Give gangs hosts, the largest first, as long as the program has about a whole one; whether that went."""
        while self.gangs:
            found = self._solve()
            if found is None:
                if not self._retreat():
                    return False
                continue
            some = np.array(list(self.gangs))
            size = np.array([gang.size for gang in self.gangs.values()])
            settled = np.array([len(self._hosts.get(kind, ())) for kind in some.tolist()])
            wanted = self.kinds.needs[some] @ found.tables / size - settled
            if not (wanted >= _HALF).any():
                break
            weight = self.kinds.size[some].max(axis=1)
            kind = int(some[np.argmax(np.where(wanted >= _HALF, weight, -1.0))])
            self._settle(kind, self.gangs[kind])
        self._bar()
        return True

    def _settle(self, kind: int, gang: Gang) -> None:
        """Give a gang the host on which the program has most of it; of many that are equal, each has a part."""
        groups = self.program.groups
        index = int(np.argmax([group.uses @ group.patterns[:, kind] / len(group.ranks) for group in groups]))
        chosen = (np.arange(len(self.kinds.size)) == kind).astype(np.float64)
        self._choose(index, chosen, is_gang=True)
        group = groups[index]
        if len(group.ranks) > self.local:
            group = group.split(group.ranks[-self.local :])
            groups.append(group)
        self._hosts.setdefault(kind, []).append(group.ranks[0])
        if gang.has_places:
            group.room = group.room - self.kinds.size[kind]
            self.program.covered = self.program.covered + gang.size * chosen
        self._decide(np.array([kind]))

    def _bar(self) -> None:
        """From now on gangs lie on the hosts that they were given, or nowhere."""
        for group in self.program.groups:
            group.most = group.most.copy()
            for kind, gang in self.gangs.items():
                here = self._hosts.get(kind, []).count(group.ranks[0])
                group.most[kind] = 0 if gang.has_places else here * gang.size
        barred = [kind for kind in self.gangs if kind not in self._hosts]
        self.program.is_allowed = self.program.is_allowed & ~(self.kinds.needs[barred] > 0).any(axis=0)
