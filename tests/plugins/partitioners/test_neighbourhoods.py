"""A few ranks shared out anew by a solver: plans become numbers and plans again, and what is over comes within."""

from __future__ import annotations

import numpy as np
import pytest
from tests.plugins.partitioners.planted import planted, used_bytes
from tests.plugins.proposers.spaces import costed

from shardwright.planning.placement import propose, ranks_of_tables
from shardwright.planning.tables import TableSpec
from shardwright.planning.topology import Topology
from shardwright_plugins.packing.assignment import Assignment, Catalogue
from shardwright_plugins.packing.limits import Effort
from shardwright_plugins.packing.neighbourhoods import Neighbourhoods, quickened, repaired, without_time
from shardwright_plugins.packing.patience import packed, packed_soon


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
    proposal, ranks = Neighbourhoods(without_time(problem.space), start, 1.0).repaired(5, lambda: False)
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


@pytest.mark.parametrize("seed", [253, 1446])
def test_packed_soon_solves_planted_problems_from_one_of_two_starts(seed):
    space = planted(seed).space
    proposal = space.prover.refute(space.most_ms * 1.01, max_cases=12).possible
    found = packed_soon(Catalogue(space), proposal, space.most_ms * 1.01, lambda: False)
    assert np.isfinite(found.value_ms)
    shards = propose(space, found.proposal)
    assert (shards.used_bytes(found.ranks) <= space.capacity_bytes).all()
    assert packed_soon(Catalogue(space), proposal, space.most_ms * 1.01, lambda: True) is None


def uneven(ranks: int = 8) -> Assignment:
    """Eight tables of unlike sizes, all on the first two ranks."""
    topology = Topology(ranks, "cpu", ddr_cap=1 << 30, local_world_size=ranks)
    tables = [TableSpec(f"t{index}", 3000 + 500 * index, 64, ["f"]) for index in range(8)]
    space = costed(tables, topology)
    options = space.options
    whole = [
        next(o for o in options.of_table(table) if options.type_of(o).name == "table_wise")
        for table in range(8)
    ]
    plan = Assignment(Catalogue(space, Effort()), np.array(whole), space.most_ms)
    plan.place(np.arange(8) % 2)
    return plan


def test_quickened_shares_out_what_lies_on_few_ranks_and_keeps_memory():
    plan = uneven()
    limit = 0.4 * plan.value_ms
    found = quickened(plan.catalogue, plan, limit, 20)
    assert found is not None
    assert found.value_ms <= limit * (1 + 1e-6)
    assert (found.bins.used[:, 1:] <= plan.space.capacity_bytes).all()
    assert plan.value_ms > 2 * found.value_ms


def test_quickened_of_a_problem_that_is_too_large_says_so(monkeypatch):
    plan = uneven()
    monkeypatch.setattr("shardwright_plugins.packing.neighbourhoods._MOST_TIMED_COLUMNS", 3)
    assert quickened(plan.catalogue, plan, 0.4 * plan.value_ms, 20) is None
