"""round_robin keeps what every sharding type must, and deals rows one by one."""

from __future__ import annotations

import pytest
import shardwright_round_robin
from tests.contrib import distributions

import shardwright as sw
from shardwright.host import PluginHost, use_host
from shardwright_testing import ShardingTypeTests


class TestRoundRobin(ShardingTypeTests):
    @pytest.fixture
    def sharding_type(self) -> sw.ShardingType:
        return shardwright_round_robin.RoundRobin()


def plan_of(table: sw.TableSpec) -> tuple[sw.ShardingPlan, str]:
    """Planned on three ranks, and the report."""
    constraints = {"*": sw.ParameterConstraints(sharding_types=["round_robin"])}
    topology = sw.Topology(world_size=3, compute_device="cpu")
    with use_host(PluginHost(plugins={"round_robin": shardwright_round_robin})):
        planner = sw.EmbeddingShardingPlanner(topology=topology, constraints=constraints, batch_size=4)
        plan = planner.plan_tables([table])
        assert sw.ShardingPlan.from_json(plan.to_json()) == plan
    return plan, str(planner.report)


def test_round_robin_planned_deals_rows_one_by_one() -> None:
    plan, report = plan_of(sw.TableSpec("t", 8, 4, ["f"]))
    assert "RR (round_robin)" in report
    sharding = plan.plan[""]["t"]
    held = {block.rank: list(range(8))[block.rows.rows] for block in sharding.layout.blocks}
    assert held == {0: [0, 3, 6], 1: [1, 4, 7], 2: [2, 5]}


def test_round_robin_in_use_changes_nothing_of_core_or_plugins() -> None:
    plan_of(sw.TableSpec("t", 8, 4, ["f"]))  # what is imported on first use is there
    with distributions.nothing_changes():
        plan_of(sw.TableSpec("t", 9, 4, ["f"]))
