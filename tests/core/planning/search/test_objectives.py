from __future__ import annotations

import numpy as np
import pytest

from shardwright.errors import UnknownNameError
from shardwright.planning.machines.topology import Topology
from shardwright.planning.search.objectives import largest_rank_time, step_time
from shardwright.planning.tables.spec import TableSpec
from shardwright.runtime.sharded.models.planner import EmbeddingShardingPlanner

PHASES = {"forward": np.array([3.0, 1.0]), "backward": np.array([1.0, 4.0])}


def test_objectives_differ_where_phases_have_different_slowest_ranks():
    assert largest_rank_time(PHASES) == 5.0
    assert step_time(PHASES) == 7.0


def planned(objective):
    tables = [TableSpec(f"t{i}", rows, 8, ["f"]) for i, rows in enumerate((10, 7, 3))]
    planner = EmbeddingShardingPlanner(Topology(2, "cpu", ddr_cap=10_000), 4, objective=objective)
    return planner.plan_tables(tables).document["objective"]


def test_planner_rates_plans_by_the_objective_that_is_named():
    first, second = planned("largest_rank_time"), planned("step_time")
    assert (first["name"], second["name"]) == ("largest_rank_time", "step_time")
    assert second["value_ms"] >= first["value_ms"] * (1 - 1e-9)
    assert second["lower_bound_ms"] <= second["value_ms"]


@pytest.mark.parametrize("name", [3, ["step_time"], None])
def test_planner_objective_that_is_no_name_raises(name):
    with pytest.raises(UnknownNameError, match="no objective"):
        EmbeddingShardingPlanner(objective=name)


def test_planner_unknown_objective_raises_with_the_nearest():
    with pytest.raises(UnknownNameError, match=r"no objective 'step_tim'.*Did you mean 'step_time'\?"):
        EmbeddingShardingPlanner(objective="step_tim")
