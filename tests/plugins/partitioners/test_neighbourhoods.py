"""A few ranks shared out anew by a solver: plans become numbers and plans again, and what is over comes within."""

from __future__ import annotations

import numpy as np
import pytest
from tests.plugins.partitioners.planted import planted, used_bytes

from shardwright.planning.placement import propose, ranks_of_tables
from shardwright_plugins.packing.assignment import Assignment, Catalogue
from shardwright_plugins.packing.limits import Effort
from shardwright_plugins.packing.neighbourhoods import Neighbourhoods, repaired
from shardwright_plugins.packing.patience import packed


def assigned(problem, ranks_of=lambda ranks: ranks):
    """The plan that was planted, its shards that may move elsewhere."""
    space = problem.space
    proposal = np.array([option for option, _ in problem.plan])
    assignment = Assignment(Catalogue(space, Effort()), proposal, space.most_ms)
    free = propose(space, proposal, with_fixed=True).rank < 0
    ranks = np.concatenate([ranks for _, ranks in problem.plan])[free]
    assignment.place(ranks_of(ranks))
    return assignment


# With tables cut over hosts, and without.
@pytest.mark.parametrize("seed", [5, 8, 253])
def test_neighbourhoods_of_a_plan_that_fits_leave_it_as_it_is(seed):
    problem = planted(seed)
    start = assigned(problem)
    proposal, ranks = Neighbourhoods(problem.space, start).repaired(5, lambda: False)
    # Tables that are alike may have changed places; what each rank holds may not.
    plan = list(zip(proposal.tolist(), ranks_of_tables(problem.space, proposal, ranks), strict=True))
    np.testing.assert_array_equal(used_bytes(problem.space, plan), used_bytes(problem.space, problem.plan))


def test_repaired_brings_a_rank_with_a_shard_too_many_within_memory():
    problem = planted(397)
    crowded = assigned(problem, lambda ranks: np.where(np.arange(len(ranks)) == len(ranks) - 1, 0, ranks))
    assert np.isinf(crowded.value_ms)
    found = repaired(crowded.catalogue, crowded, 20, lambda: False)
    assert np.isfinite(found.value_ms)
    assert (found.bins.used[:, 1:] <= problem.space.capacity_bytes).all()


def test_repaired_that_is_over_at_once_leaves_the_plan_as_it_was():
    problem = planted(397)
    start = assigned(problem, np.zeros_like)
    found = repaired(start.catalogue, start, 20, lambda: True)
    np.testing.assert_allclose(found.bins.used, start.bins.used)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [242, 253])
def test_packed_solves_planted_problems_that_no_single_moves_solve(seed):
    problem = planted(seed)
    catalogue = Catalogue(problem.space, Effort())
    proposal = np.array([option for option, _ in problem.plan])
    found = packed(catalogue, proposal, problem.space.most_ms, lambda: False)
    assert found is not None
    assert np.isfinite(found.value_ms)
