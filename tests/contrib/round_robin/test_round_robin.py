"""round_robin keeps what every sharding type must, and deals rows one by one."""

from __future__ import annotations

import pytest
import shardwright_round_robin

import shardwright as sw
from shardwright.plugins import PluginHost, use_host
from shardwright.testing import ShardingTypeTests


class TestRoundRobin(ShardingTypeTests):
    @pytest.fixture
    def sharding_type(self) -> sw.ShardingType:
        return shardwright_round_robin.RoundRobin()


def test_round_robin_planned_deals_rows_one_by_one() -> None:
    constraints = {"*": sw.ParameterConstraints(sharding_types=["round_robin"])}
    topology = sw.Topology(world_size=3, compute_device="cpu")
    with use_host(PluginHost(plugins={"round_robin": shardwright_round_robin})):
        planner = sw.EmbeddingShardingPlanner(topology=topology, constraints=constraints, batch_size=4)
        plan = planner.plan_tables([sw.TableSpec("t", 8, 4, ["f"])])
        assert sw.ShardingPlan.from_json(plan.to_json()) == plan
        assert "RR (round_robin)" in str(planner.report)
    sharding = plan.plan[""]["t"]
    held = {block.rank: list(range(8))[block.rows.rows] for block in sharding.layout.blocks}
    assert held == {0: [0, 3, 6], 1: [1, 4, 7], 2: [2, 5]}
