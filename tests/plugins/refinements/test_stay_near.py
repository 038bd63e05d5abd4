"""Plans that stay near another one, with the built-in plugins."""

from __future__ import annotations

import functools
import json
import random

import pytest

import shardwright as sw
from shardwright_plugins.refinements.stay_near import StayNear

COSTS = (0.0, 1e-3, 1e-2, 0.1, 1e9)
DRAWN = random.Random(3)
TABLES = [
    sw.TableSpec(
        f"t{number}",
        DRAWN.choice([10_000, 1_000_000, 8_000_000]),
        DRAWN.choice([32, 64, 128]),
        [f"f{number}"],
        optimizer=sw.OptimizerSpec("row_wise_adagrad"),
    )
    for number in range(8)
]


def planner(seed=0, *, tables=TABLES, ranks=8, rules=None, **arguments):
    """A planner of the tables, which are looked up otherwise for each seed."""
    drawn = random.Random(seed)
    asked = {
        table.name: sw.ParameterConstraints(
            pooling_factors=[drawn.choice([1.0, 5.0, 50.0])], **(rules or {}).get(table.name, {})
        )
        for table in tables
    }
    topology = sw.Topology(ranks, "cuda", local_world_size=4)
    return sw.EmbeddingShardingPlanner(
        topology, 2048, constraints=asked, **{"proposer": "greedy", **arguments}
    )


@functools.cache
def old_plan():
    """A plan made before, for lookups that have changed since."""
    return planner().plan_tables(TABLES)


def near(old, cost, **arguments):
    """A plan near another, its value, and the bytes that move."""
    made = planner(refinements=StayNear(old, cost), **arguments)
    plan = made.plan_tables(TABLES)
    return plan, made.report.plan.value_ms, plan.document["inputs"]["moved_bytes"]["value"]


@pytest.mark.parametrize(
    ("chosen", "costs"),
    [
        ({}, COSTS[::2]),
        *(
            pytest.param(chosen, COSTS, marks=pytest.mark.slow)
            for chosen in (
                {},
                {"proposer": None},  # the preferred one
                {"proposer": "uniform"},
                {"proposer": "greedy"},
                {"partitioner": "greedy_perf"},
                {"partitioner": "memory_balanced"},
                {"partitioner": "longest_first"},
                {"objective": "step_time"},
            )
        ),
    ],
    ids=lambda chosen: str(len(chosen)) if isinstance(chosen, tuple) else "-".join(map(str, chosen.values())),
)
def test_dearer_moves_move_less_and_take_longer_from_the_best_plan_to_the_old_one(chosen, costs):
    old = planner(0, **chosen).plan_tables(TABLES)
    best = planner(1, **chosen)
    best.plan_tables(TABLES)
    found = [near(old, cost, seed=1, **chosen) for cost in costs]
    values, moved = [value for _, value, _ in found], [size for *_, size in found]
    assert values == sorted(values)
    assert moved == sorted(moved, reverse=True)
    assert values[0] <= best.report.plan.value_ms * (1 + 1e-9)
    assert found[-1][0] == old
    assert moved[-1] == 0


def test_moved_bytes_are_those_that_a_reshard_sends():
    old = old_plan()
    for cost in COSTS[1:3]:
        plan, _, moved = near(old, cost, seed=1)
        links = sw.compare_plans(old, plan).moves.by_link
        sent = links["intra_host"] + links["inter_host"]
        assert sent <= moved <= sent + links["same_rank"]


def test_plan_that_does_not_fit_any_more_is_kept_as_far_as_it_does():
    old = old_plan()
    rules = {"t1": {"ranks": [7]}, "t2": {"sharding_types": ["table_wise"]}}
    plan, _, moved = near(old, 1e9, rules=rules)
    assert plan != old
    kept = [name for name, own in plan.plan[""].items() if own == old.plan[""][name]]
    assert len(kept) >= len(TABLES) - 4
    assert moved > 0


def test_other_ranks_and_new_tables_cost_what_their_rows_take():
    old = planner(0, ranks=4, tables=TABLES[1:]).plan_tables(TABLES[1:])
    plan, _, moved = near(old, 1e9)
    assert set(plan.plan[""]) == {table.name for table in TABLES}
    assert moved < sum(t.num_embeddings * (4 * t.embedding_dim + 4) for t in TABLES[1:])


def test_plan_says_what_moves_and_is_checked_as_any_other():
    old = old_plan()
    made = planner(1, refinements=[StayNear(old, move_cost=0.01)])
    plan = made.plan_tables(TABLES)
    inputs = json.loads(plan.to_json())["inputs"]
    assert inputs["move_cost_ms_per_gib"] == {"value": 0.01, "provenance": "given"}
    assert inputs["fastest_ms"]["value"] <= made.report.plan.value_ms
    assert any("at 0.01 ms for each GiB" in line for line in made.report.summary)
    assert sw.check_plan(sw.ShardingPlan.from_json(plan.to_json())).problems == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"plan": {"a": 1}}, "plan must be a ShardingPlan"),
        (
            {"plan": sw.ShardingPlan(), "move_cost": -1.0},
            "move_cost must be a finite number from 0, got -1.0",
        ),
        (
            {"plan": sw.ShardingPlan(), "move_cost": "much"},
            "move_cost must be a finite number from 0, got 'much'",
        ),
    ],
)
def test_wrong_wishes_are_errors_that_name_the_argument(arguments, text):
    with pytest.raises(sw.InvalidInputError, match=text):
        StayNear(**arguments)


def test_plan_of_another_model_is_refused():
    other = [sw.TableSpec("t0", 17, 8, ["f0"])]
    old = planner(0, tables=other).plan_tables(other)
    with pytest.raises(sw.PlanError, match=r"has 17 x 8 elements for table 't0'.*another model"):
        planner(refinements=[StayNear(old)]).plan_tables(TABLES)
