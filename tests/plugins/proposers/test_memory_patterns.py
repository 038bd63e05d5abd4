"""Plans by patterns in whole numbers: where hardly any memory is left, and within a time."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from tests.plugins.partitioners.planted import planted, used_bytes
from tests.plugins.proposers.spaces import three_sizes

from shardwright.planning.bound import Certificate
from shardwright.planning.placement import propose
from shardwright.planning.proof import why_unproven
from shardwright_plugins.packing.assignment import Catalogue
from shardwright_plugins.proposers._full_patterns import full_patterns
from shardwright_plugins.proposers._memory_patterns import packed_by_memory
from shardwright_plugins.proposers._programs import Programs
from shardwright_plugins.proposers._timed_patterns import packed_within
from shardwright_plugins.proposers._wide_gaps import WideGap


def never():
    return False


@pytest.mark.parametrize("seed", range(6))
def test_full_patterns_are_all_sets_that_leave_little_free(seed):
    random = np.random.default_rng(seed)
    size, most = random.uniform(0.1, 0.6, size=(5, 2)), random.integers(1, 4, size=5)
    found = full_patterns(size, most, 0, 0.15)
    sets = np.array(list(product(*[range(number + 1) for number in most])))
    wanted = sets[(sets @ size <= 1).all(axis=1) & (sets @ size[:, 0] >= 0.85)]
    assert {tuple(row) for row in found.shards.astype(int).tolist()} == {
        tuple(row) for row in wanted.tolist()
    }
    assert not found.is_small.any()
    assert (found.free == 0).all()  # nothing is poured in


def test_full_patterns_of_many_small_shards_leave_room_for_these():
    size = np.append(np.linspace(0.3, 0.6, 40), np.linspace(0.001, 0.01, 60))[:, None]
    found = full_patterns(size, np.ones(100, dtype=np.int64), 0, 0.05)
    assert found.is_small.any()
    assert (found.shards[:, found.is_small] == 0).all()
    assert (found.shards @ size[:, 0] <= 1 + 1e-9).all()


def check_fits(space, found):
    shards = propose(space, found.proposal)
    assert (shards.used_bytes(found.ranks) <= space.capacity_bytes).all()


@pytest.mark.parametrize("local", [4, 32])
def test_packed_by_memory_fills_hosts_and_ranks(local):
    space = three_sizes(240, 32, local=local, mib=20)
    found = packed_by_memory(Catalogue(space), space.most_ms, never)
    assert found is not None
    check_fits(space, found)


def test_packed_by_memory_where_there_is_too_little_is_none():
    space = three_sizes(240, 32, local=32, mib=4)
    assert packed_by_memory(Catalogue(space), space.most_ms, never) is None


def test_packed_by_memory_that_is_to_end_ends():
    space = three_sizes(240, 32, local=32, mib=20)
    assert packed_by_memory(Catalogue(space), space.most_ms, lambda: True) is None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [679, 682])
def test_packed_by_memory_solves_planted_problems_that_repair_does_not_solve(seed):
    problem = planted(seed)
    assert (used_bytes(problem.space, problem.plan) <= problem.space.capacity_bytes).all()
    found = packed_by_memory(Catalogue(problem.space), problem.space.most_ms, never)
    assert found is not None
    check_fits(problem.space, found)


def test_packed_within_keeps_to_memory_and_about_to_the_time():
    space = three_sizes(240, 32, local=8, mib=64)
    limit = space.bound.possible_ms * 1.2
    found = packed_within(Catalogue(space), limit)
    assert found is not None
    assert found.value_ms <= limit * 1.05
    check_fits(space, found)


def test_wide_gap_yields_better_and_better_plans_above_a_bound_that_is_proven():
    space = three_sizes(24, 8, local=4, mib=64)
    catalogue, before = Catalogue(space), space.prover.bound_ms
    start = packed_within(catalogue, 3 * space.bound.possible_ms)
    assert start.value_ms > before * 1.03
    wide = WideGap(catalogue, Programs(catalogue), start)
    values = [found.value_ms for found in wide.plans()]
    assert values == sorted({start.value_ms, *values}, reverse=True)[1:]
    assert before <= space.prover.bound_ms <= wide.best.value_ms
    assert wide.best.value_ms <= space.prover.bound_ms * 1.05
    assert why_unproven(space, space.prover.bound_ms, space.prover.certificate.to_data()) == ""
    check_fits(space, wide.best)


def test_wide_gap_that_is_not_wide_is_left():
    space = three_sizes(24, 8, local=4, mib=64)
    catalogue = Catalogue(space)
    start = packed_within(catalogue, 3 * space.bound.possible_ms)
    space.prover.accept(Certificate(start.value_ms * 0.98))
    wide = WideGap(catalogue, Programs(catalogue), start)
    assert not wide.is_wide
    assert list(wide.plans()) == []
