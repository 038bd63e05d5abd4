"""Plans by patterns: the program's ranks against an exact solver's, and shards where the patterns say."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog
from tests.plugins.proposers.spaces import MIB, three_sizes

from shardwright.planning.constraints import ParameterConstraints
from shardwright.planning.planner import EmbeddingShardingPlanner
from shardwright.planning.tables import TableSpec
from shardwright.planning.topology import Topology
from shardwright_plugins.packing.assignment import Catalogue
from shardwright_plugins.proposers._folded import Folded
from shardwright_plugins.proposers._pattern_program import Kinds, Program
from shardwright_plugins.proposers._patterns import Patterns, packed, whole_tables


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
