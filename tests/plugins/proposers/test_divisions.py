"""What is left to what lies on every rank, and whole numbers of hosts with gangs."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from tests.plugins.proposers.spaces import three_sizes

from shardwright.planning.options import NO_GANG
from shardwright.planning.placement import propose
from shardwright.planning.watch import Watch
from shardwright_plugins.packing.assignment import Assignment, Catalogue
from shardwright_plugins.proposers._divisions import Divisions
from shardwright_plugins.proposers._pattern_program import HostPattern
from shardwright_plugins.proposers._patterns import kinds_of, seat, spread_of
from shardwright_plugins.proposers._timed_patterns import packed_within
from shardwright_plugins.proposers._whole_patterns import _largest, seated, whole_numbers


def check_fits(space, found):
    shards = propose(space, found.proposal)
    assert (shards.used_bytes(found.ranks) <= space.capacity_bytes).all()


def whole_of(kinds):
    """The first option of each table."""
    return np.flatnonzero(np.diff(kinds.table, prepend=-1))


def test_fewest_divisions_leave_room_for_what_has_to_lie_on_every_rank():
    space = three_sizes(240, 32, local=8, mib=24)
    limit = space.bound.possible_ms * 1.2
    found = Divisions(Catalogue(space), limit).fewest()
    assert [division.ranks for division in found] == sorted(division.ranks for division in found)
    for division in found:
        least = division.kinds.least_spread(space.options.multiplicity)
        assert (least <= division.kinds.budget + 1e-6).all()
        assert (division.patterns @ division.kinds.size <= 1 + 1e-6).all()


def test_fewest_divisions_choose_one_option_of_a_large_table_that_is_like_no_other():
    space = three_sizes(96, 16, local=8, mib=24, large_rows=600_000)
    limit = space.bound.possible_ms * 1.5
    large = len(space.options.tables) - 1
    assert space.options.multiplicity[large] == 1
    found = Divisions(Catalogue(space), limit).fewest()
    assert found
    for division in found:
        assert (division.kinds.table == large).sum() == 1
        assert (division.kinds.table == 0).sum() > 1


def test_divisions_of_a_time_without_options_are_none():
    space = three_sizes(24, 8, local=4, mib=64)
    assert Divisions(Catalogue(space), space.bound.possible_ms * 1e-6).fewest() == []


def test_packed_within_finds_room_beside_a_large_table():
    space = three_sizes(96, 16, local=8, mib=24, large_rows=600_000)
    limit = space.bound.possible_ms * 1.3
    found = packed_within(Catalogue(space), limit)
    assert found is not None
    assert found.value_ms <= limit * 1.02
    check_fits(space, found)


@pytest.mark.parametrize("local", [4, 8])
def test_whole_numbers_hold_all_shards_gangs_and_others(local):
    space = three_sizes(240, 32, local=local, mib=20)
    limit = space.bound.possible_ms * 1.3
    division = Divisions(Catalogue(space), limit).fewest()[0]
    kinds, whole = division.kinds, whole_numbers(space, division.kinds, division.patterns)
    assert whole is not None
    held = np.zeros(len(kinds.size))
    ranks = sum(pattern.ranks for pattern in whole.patterns)
    for pattern in whole.patterns:
        held += pattern.ranks * pattern.shards
    for host in whole.hosts:
        assert sum(pattern.ranks for pattern in host.patterns) <= host.hosts * local
        held += host.hosts * local * host.gangs
        ranks += host.hosts * local
        for pattern in host.patterns:
            assert ((pattern.shards + host.gangs) @ kinds.size <= 1 + 1e-6).all()
            held += pattern.ranks * pattern.shards
    assert ranks <= 32
    assert (held >= kinds.needs @ whole.tables - 1e-6).all()
    check_fits(space, seated(Catalogue(space), kinds, whole, limit))


@pytest.mark.parametrize("seed", range(20))
def test_patterns_that_are_part_of_another_are_left_out(seed):
    numbers = np.random.default_rng(seed)
    shape = int(numbers.integers(1, 40)), int(numbers.integers(1, 6))
    patterns = np.unique(numbers.integers(0, 3, shape).astype(float), axis=0)
    kept = [
        pattern
        for index, pattern in enumerate(patterns)
        if not any((pattern <= other).all() for place, other in enumerate(patterns) if place != index)
    ]
    assert np.array_equal(_largest(patterns), np.array(kept))


def test_whole_numbers_and_plans_of_them_end_when_time_is_over():
    space = three_sizes(240, 32, local=8, mib=20)
    limit = space.bound.possible_ms * 1.3
    division = Divisions(Catalogue(space), limit).fewest()[0]
    late = attrs.evolve(space, watch=Watch(0.0))
    assert whole_numbers(late, division.kinds, division.patterns) is None
    assert packed_within(Catalogue(late), limit) is None


def test_kinds_count_the_shards_of_a_gang_as_its_largest():
    space = three_sizes(6, 8, local=4, mib=64)
    options = space.options
    allowed = np.logical_and.reduceat(options.gang != NO_GANG, options.first_shard[:-1])
    budget = np.zeros(1 + len(space.tiers))
    kinds = kinds_of(space, allowed, spread_of(space, space.bound.problem.covers), budget, space.most_ms)
    assert kinds.is_gang.all()
    assert (kinds.needs.sum(axis=0) == options.shards_per_option[kinds.options]).all()
    for column, option in enumerate(kinds.options.tolist()):
        gangs = options.gang[options.shards_of(option)]
        assert (kinds.needs[:, column] > 0).sum() <= len(np.unique(gangs))


def test_seat_hosts_alone_leaves_the_other_ranks_free():
    space = three_sizes(6, 8, local=4, mib=64)
    options, catalogue = space.options, Catalogue(space)
    allowed = np.logical_and.reduceat(options.gang != NO_GANG, options.first_shard[:-1])
    budget = np.zeros(1 + len(space.tiers))
    kinds = kinds_of(space, allowed, spread_of(space, space.bound.problem.covers), budget, space.most_ms)
    result = Assignment(catalogue, kinds.options[whole_of(kinds)][options.alike], space.most_ms)
    run = int(result.bins.kind[0])
    gangs = (np.arange(len(kinds.size)) == kinds.kind_of[run]).astype(np.int64)
    seat(result.bins, kinds, (), (HostPattern(gangs, 1, ()),))
    assert (result.bins.bin[result.bins.gang == result.bins.gang[0]] < 4).all()
    assert (result.bins.bin < 4).all()
