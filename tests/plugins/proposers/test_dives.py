"""Dives: the program of patterns compared with all patterns there are, and plans where hardly any memory is left."""

from __future__ import annotations

from itertools import product

import attrs
import numpy as np
import pytest
from scipy.optimize import linprog
from tests.plugins.partitioners.planted import planted, searched
from tests.plugins.partitioners.planted_families import FAMILIES, family_planted
from tests.plugins.proposers.spaces import three_sizes

from shardwright.planning.placement import propose
from shardwright_plugins.packing.assignment import Catalogue
from shardwright_plugins.packing.limits import Effort
from shardwright_plugins.proposers._dive import Dive, Gang, few_gangs
from shardwright_plugins.proposers._dive_program import DiveProgram, Group
from shardwright_plugins.proposers._dives import packed_by_dives
from shardwright_plugins.proposers._pattern_program import Kinds


def never():
    return False


def kinds_of(sizes, *, is_gang=()):
    """Tables of one shard each, no two alike."""
    number = len(sizes)
    return Kinds(
        options=np.arange(number),
        table=np.arange(number),
        needs=np.eye(number),
        size=np.column_stack([np.zeros(number), sizes]),
        kind_of=np.arange(number),
        is_gang=np.isin(np.arange(number), is_gang),
        spread=np.zeros((number, 2)),
        budget=np.zeros(2),
    )


def program_of(kinds, ranks, *, multiplicity=None):
    number = len(kinds.size)
    group = Group(list(range(ranks)), np.ones(2), np.full(number, np.inf), np.empty((0, number)), np.zeros(0))
    tables = np.ones(int(kinds.table.max()) + 1, dtype=np.int64) if multiplicity is None else multiplicity
    return DiveProgram(kinds, tables, 1, [group], Effort(), np.ones(len(kinds.options), dtype=bool))


def ranks_by_all_patterns(sizes):
    """The program of patterns with every set of tables that fits."""
    sets = np.array(list(product((0, 1), repeat=len(sizes))), dtype=np.float64)
    sets = sets[sets @ sizes <= 1 + 1e-9]
    return linprog(np.ones(len(sets)), A_ub=-sets.T, b_ub=-np.ones(len(sizes))).fun


@pytest.mark.parametrize("seed", range(6))
def test_dive_program_needs_as_many_ranks_as_with_all_patterns(seed):
    sizes = np.random.default_rng(seed).integers(8, 40, size=9) / 64
    found = program_of(kinds_of(sizes), 9).solve()
    assert found.ranks == pytest.approx(ranks_by_all_patterns(sizes), abs=1e-6)
    assert found.tables == pytest.approx(np.ones(9))


def test_dive_program_without_ranks_enough_is_none():
    assert program_of(kinds_of(np.array([0.6, 0.6, 0.6])), 2).solve() is None


def test_dive_places_all_shards_within_their_ranks():
    sizes = np.array([0.5, 0.5, 0.25, 0.75, 0.375, 0.625])
    found = Dive(kinds_of(sizes), {}, 1, program_of(kinds_of(sizes), 3)).run()
    assert found.is_whole
    held = np.array(list(found.held.values()))
    assert held.sum(axis=0).tolist() == [1] * 6
    assert (held @ sizes <= 1).all()


def test_dive_gives_gangs_hosts_with_room_for_what_else_there_is():
    # Three gangs that take a part of each of the two ranks of a host, and tables that leave room for one each, or two.
    kinds = attrs.evolve(
        kinds_of(np.array([0.25, 0.25, 0.5, 0.5, 0.5, 0.5, 0.5])), needs=np.eye(7) * [2, 2, 2, 1, 1, 1, 1]
    )
    gangs = {kind: Gang(2, has_places=True) for kind in range(3)}
    found = Dive(kinds, gangs, 2, program_of(kinds, 4)).run()
    assert found.is_whole
    first, second, third = (found.hosts[kind][0] for kind in range(3))
    assert first == second != third
    assert sorted(found.held) == [0, 1, 2, 3]


def test_few_gangs_leaves_gangs_to_tables_that_have_nothing_else():
    kinds = attrs.evolve(kinds_of(np.full(3, 0.3), is_gang=[1, 2]), table=np.array([0, 0, 1]))
    assert few_gangs(kinds, {1: Gang(2, True), 2: Gang(2, True)}).tolist() == [True, False, True]


def check_fits(space, found):
    shards = propose(space, found.proposal)
    assert (shards.used_bytes(found.ranks) <= space.capacity_bytes).all()


@pytest.mark.parametrize("seed", [813, pytest.param(1653, marks=pytest.mark.slow)])
def test_packed_by_dives_solves_planted_problems_that_patience_does_not(seed):
    space = planted(seed).space
    check_fits(space, packed_by_dives(Catalogue(space), space.most_ms * 1.01, never))


def test_packed_by_dives_gives_one_answer_to_one_problem():
    space = planted(1242).space
    first, second = (packed_by_dives(Catalogue(space), space.most_ms * 1.01, never) for _ in range(2))
    check_fits(space, first)
    assert first.proposal.tolist() == second.proposal.tolist()
    assert first.ranks.tolist() == second.ranks.tolist()


def test_packed_by_dives_where_there_is_too_little_is_none():
    space = three_sizes(24, 4, local=2, mib=4)
    assert packed_by_dives(Catalogue(space), space.most_ms, never) is None


def test_packed_by_dives_with_hardly_any_effort_is_none():
    space = planted(1653).space
    assert packed_by_dives(Catalogue(space), space.most_ms * 1.01, never, effort=1e6) is None


def test_packed_by_dives_that_is_to_end_ends():
    space = planted(813).space
    assert packed_by_dives(Catalogue(space), space.most_ms, lambda: True) is None


@pytest.mark.parametrize(
    ("family", "seed"),
    [
        ("equal", 0),
        ("triplets", 3),
        ("big_and_small", 3),
        ("hosts", 3),
        ("cuts", 3),
        ("rows", 0),
        ("two_tiers", 0),
    ],
)
def test_planted_problem_of_each_family_gets_a_plan(family, seed):
    problem = family_planted(family, seed)
    result = searched(problem)
    assert result.proposal is not None, result.misfit
    assert (result.feedback.used_bytes <= problem.space.capacity_bytes).all()


def test_every_family_is_tried():
    tried = test_planted_problem_of_each_family_gets_a_plan.pytestmark[0].args[1]
    assert {family for family, _ in tried} == set(FAMILIES)
