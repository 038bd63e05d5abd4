"""The built-in refinements: plans that stay near another one, and caches that fill spare memory."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import numpy as np
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


ROWS, DIM = 4_000_000, 128  # 2 GiB a table


ASKED = 0.05


def statistics(exponent: float) -> sw.EmbeddingOffloadStats:
    """Of a table whose ids are Zipf's: the larger the exponent, the fewer rows have most of the lookups."""
    lookups = np.diff(np.linspace(0, 1, 101) ** (1 / exponent))
    return sw.EmbeddingOffloadStats(0.1, 10_000, tuple((lookups * 1e6).tolist()), ROWS)


def tables(*, has_statistics: bool = True) -> list[sw.TableSpec]:
    return [
        sw.TableSpec(
            name,
            ROWS,
            DIM,
            (name,),
            optimizer=sw.OptimizerSpec("sgd"),
            cache=sw.CacheParams(ASKED, stats=statistics(exponent) if has_statistics else None),
        )
        for name, exponent in (("hot", 8.0), ("even", 1.0))
    ]


def planned(specs: list[sw.TableSpec], hbm_gib: float, **arguments: Any) -> tuple[Any, Any]:
    """The plan and its report; tables are cut over both ranks and kept in the hosts' memory."""
    topology = sw.Topology(
        world_size=2, compute_device="cuda", hbm_cap=int(hbm_gib * 2**30), ddr_cap=64 << 30
    )
    rule = sw.ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused_uvm_caching"])
    planner = sw.EmbeddingShardingPlanner(
        topology, 512, constraints={"*": rule}, storage_reservation=0.0, **arguments
    )
    return planner.plan_tables(specs), planner.report


def load_factors(plan: Any) -> dict[str, float]:
    return {name: entry.layout.extras["cache"]["load_factor"] for name, entry in plan.plan[""].items()}


def value_ms(report: Any) -> float:
    return float(report.result.plan.value_ms)


def test_caches_fill_spare_memory_where_they_save_most() -> None:
    plain, before = planned(tables(), 1.0)
    larger, report = planned(tables(), 1.0, refinements="scale_up_caches")
    assert load_factors(plain) == {"hot": ASKED, "even": ASKED}
    factors = load_factors(larger)
    # 2 GiB of device memory hold half of both tables; the even one gains as much by each row, the hot one little more.
    assert factors["even"] > 0.7
    assert ASKED <= factors["hot"] < 0.3
    assert value_ms(report) < 0.8 * value_ms(before)
    used, capacity = report.result.plan.used_bytes[:, 0], report.space.capacity_bytes[:, 0]
    assert (used <= capacity).all()
    assert (used > 0.9 * capacity).all()


def test_tables_without_statistics_grow_alike_and_to_the_whole_where_there_is_room() -> None:
    half = load_factors(planned(tables(has_statistics=False), 1.0, refinements="scale_up_caches")[0])
    assert half["hot"] == pytest.approx(half["even"], abs=0.1)
    assert 0.3 < half["hot"] < 0.6
    whole = planned(tables(has_statistics=False), 16.0, refinements="scale_up_caches")[0]
    assert load_factors(whole) == {"hot": 1.0, "even": 1.0}
