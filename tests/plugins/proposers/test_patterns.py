"""Plans by patterns: the program's ranks against an exact solver's, and shards where the patterns say."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from scipy.optimize import linprog
from tests.plugins.proposers.spaces import MIB, three_sizes

from shardwright.planning.constraints import ParameterConstraints
from shardwright.planning.options import FREE
from shardwright.planning.placement import propose
from shardwright.planning.planner import EmbeddingShardingPlanner
from shardwright.planning.tables import TableSpec
from shardwright.planning.topology import Topology
from shardwright.planning.watch import Watch
from shardwright_plugins.packing.assignment import Catalogue
from shardwright_plugins.proposers._bisection import Bisection
from shardwright_plugins.proposers._few_options import FewOptions
from shardwright_plugins.proposers._folded import Folded
from shardwright_plugins.proposers._pattern_program import Kinds, Program
from shardwright_plugins.proposers._patterns import Patterns, packed, spread_of, whole_tables
from shardwright_plugins.proposers._patterns import kinds_of as kinds_of_space


def kinds_of(sizes, counts):
    """Tables of one option with one shard each."""
    number = len(sizes)
    return Kinds(
        options=np.arange(number),
        table=np.arange(number),
        needs=np.eye(number),
        size=np.array(sizes, dtype=np.float64),
        kind_of=np.arange(number),
        is_gang=np.zeros(number, dtype=bool),
        spread=np.zeros((number, len(sizes[0]))),
        budget=np.zeros(len(sizes[0])),
    ), np.array(counts)


def least_ranks(sizes, counts):
    """The same program with all patterns, by SciPy."""
    size = np.array(sizes)
    most = [int(1 / max(one)) for one in sizes]
    patterns = np.array(np.meshgrid(*[range(count + 1) for count in most])).reshape(len(sizes), -1)
    patterns = patterns[:, (size.T @ patterns <= 1 + 1e-9).all(axis=0)]
    return linprog(np.ones(patterns.shape[1]), A_ub=-patterns, b_ub=-np.array(counts)).fun


@pytest.mark.parametrize("seed", range(12))
def test_program_needs_about_as_many_ranks_as_with_all_patterns(seed):
    random = np.random.default_rng(seed)
    sizes = random.uniform(0.12, 0.7, size=(5, 2)).tolist()
    counts = random.integers(3, 40, size=5).tolist()
    solution = Program(*kinds_of(sizes, counts)).solve(0)
    least = least_ranks(sizes, counts)
    assert least * (1 - 1e-6) <= solution.ranks <= least * 1.02 + 1e-3


def test_program_patterns_fit_and_hold_all_shards():
    sizes, counts = [[0.6, 0.1], [0.3, 0.5], [0.1, 0.05]], [20, 30, 50]
    solution = Program(*kinds_of(sizes, counts)).solve(0)
    held = sum(pattern.ranks * pattern.shards for pattern in solution.patterns)
    assert all((pattern.shards @ np.array(sizes) <= 1 + 1e-6).all() for pattern in solution.patterns)
    assert (held >= np.array(counts) - 1e-3).all()


def test_program_stops_where_the_ranks_are_enough():
    sizes, counts = [[0.6, 0.1], [0.3, 0.5], [0.1, 0.05]], [20, 30, 50]
    best, some = (Program(*kinds_of(sizes, counts)).solve(enough) for enough in (0, 60))
    assert best.ranks <= some.ranks <= 60


def test_whole_tables_takes_each_option_about_as_often_as_asked():
    kinds, _ = kinds_of([[0.1], [0.1], [0.1]], [0])
    kinds = Kinds(**{**_fields(kinds), "table": np.array([0, 0, 1])})
    proposal = whole_tables(np.array([2.4, 4.6, 3.0]), kinds, np.array([0] * 7 + [1] * 3))
    assert np.bincount(proposal).tolist() == [2, 5, 3]


def _fields(kinds):
    return {name: getattr(kinds, name) for name in Kinds.__slots__ if not name.startswith("_")}


@pytest.mark.parametrize("local", [4, 32])
def test_packed_puts_every_shard_somewhere(local):
    space = three_sizes(240, 32, local=local, mib=64)
    problem = space.bound.problem
    limit = space.bound.possible_ms * 1.1
    base = problem.maximise(limit).proposal()
    found = packed(Patterns(Catalogue(space), problem.covers), base, limit)
    assert found is not None
    assert (found.bins.bin >= 0).all()
    assert np.isfinite(found.value_ms)


@pytest.mark.parametrize("local", [4, 32])
def test_patterns_begin_with_those_of_another_time_and_need_no_more_ranks(local):
    space = three_sizes(240, 32, local=local, mib=64)
    problem = space.bound.problem
    fresh, used = (Patterns(Catalogue(space), problem.covers) for _ in range(2))
    budget = fresh.budget(problem.maximise(space.bound.possible_ms * 1.1).proposal())
    first = used.trial(budget, space.bound.possible_ms * 1.05, part=0)
    for part in (1.05, 1.1):
        limit = space.bound.possible_ms * part
        alone, again = (patterns.trial(budget, limit, part=0) for patterns in (fresh, used))
        assert again.solution.ranks <= alone.solution.ranks * 1.02 + 1e-3
        assert again.solution.ranks <= first.solution.ranks * (1 + 1e-3)
        size = again.kinds.size
        assert all((pattern.shards @ size <= 1 + 1e-6).all() for pattern in again.solution.patterns)


@pytest.mark.parametrize("local", [4, 32])
def test_folded_finds_a_plan_near_the_bound(local):
    space = three_sizes(240, 32, local=local, mib=64)
    found = Folded(space, Patterns(Catalogue(space), space.bound.problem.covers)).plan()
    assert found is not None
    assert (found.bins.bin >= 0).all()
    assert space.bound.certificate.z_ms <= found.value_ms <= space.bound.certificate.z_ms * 1.1


def test_plan_many_equal_tables_over_many_ranks_is_near_its_bound():
    rule = {"*": ParameterConstraints(sharding_types=["table_wise", "row_wise"])}
    topology = Topology(32, "cpu", ddr_cap=48 * MIB, local_world_size=8)
    tables = [TableSpec(f"t{index}", (9000, 4000, 500)[index % 3], 64, ["f"]) for index in range(300)]
    plan = EmbeddingShardingPlanner(topology, 64, constraints=rule).plan_tables(tables)
    assert plan.document["objective"]["gap"] <= 0.03


def test_few_options_are_given_those_that_the_prices_ask_for():
    space = three_sizes(240, 32, local=4, mib=64)
    problem, usable = space.bound.problem, Catalogue(space).is_efficient
    limit = space.bound.possible_ms * 1.1
    spread = spread_of(space, problem.covers)
    budget = spread[problem.maximise(limit).proposal()].sum(axis=0)
    is_free = np.logical_and.reduceat(space.options.rank == FREE, space.options.first_shard[:-1])
    allowed = usable & (is_free | problem.covers) & (space.largest_cost_ms <= limit)
    everything = kinds_of_space(space, allowed, spread, budget, limit)
    best = Program(everything, space.options.multiplicity).solve(0).ranks
    few, chosen = (
        FewOptions(space, problem.covers),
        allowed & (problem.covers | is_dearest(space, allowed & is_free)),
    )
    for _ in range(6):
        kinds = kinds_of_space(space, chosen, spread, budget, limit)
        program = Program(kinds, space.options.multiplicity)
        ranks = program.solve(0).ranks
        if few.add_missing(program, kinds, everything) is None:
            break
        chosen = chosen | few.kept
    assert ranks <= best * 1.02 + 1e-3
    assert few.kept.any()
    assert not (few.kept & ~allowed).any()


def is_dearest(space, allowed):
    """Of each table, the option that is allowed and costs most: ``[O]``."""
    cost = np.where(allowed, space.total_cost_ms, -1.0)
    most = np.maximum.reduceat(cost, space.options.first_option[:-1])[space.options.table]
    return allowed & (cost == most)


def test_program_begins_where_another_ended_and_needs_as_many_ranks():
    sizes, counts = [[0.6, 0.1], [0.3, 0.5], [0.1, 0.05]], [20, 30, 50]
    kinds, multiplicity = kinds_of(sizes, counts)
    first = Program(kinds, multiplicity)
    ranks = first.solve(0).ranks
    again = Program(kinds, multiplicity, first.patterns, first)
    assert again.solve(0).ranks == pytest.approx(ranks)


@pytest.mark.parametrize("ranks", [4, 32])
def test_search_whose_time_is_over_at_once_has_a_plan_in_haste(ranks):
    space = attrs.evolve(three_sizes(240, ranks, local=4, mib=512), watch=Watch(seconds=0.0))
    found = list(Bisection(space).plans())
    assert found
    feedback = propose(space, found[-1].proposal).used_bytes(found[-1].ranks)
    assert (feedback <= space.capacity_bytes).all()


def test_search_whose_time_is_over_with_no_plan_proposes_nothing_more():
    space = attrs.evolve(three_sizes(240, 4, local=4, mib=1), watch=Watch(seconds=0.0))
    assert list(Bisection(space).plans()) == []
