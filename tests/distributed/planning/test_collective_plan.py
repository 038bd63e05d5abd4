"""collective_plan over real processes: one plan, or one error, for all ranks."""

from __future__ import annotations

import json

import pytest
from tests.distributed.planning import plan_workers

from shardwright import EmbeddingBagCollectionSharder, EmbeddingShardingPlanner, ShardingPlan, Topology
from shardwright_testing.ranks import RankPool

pytestmark = pytest.mark.distributed


def test_collective_plan_is_the_same_document_on_every_rank(pool: RankPool) -> None:
    documents = pool.run(plan_workers.plan_json, 2)
    assert documents[0] == documents[1]
    inputs = json.loads(documents[0])["inputs"]
    assert inputs["world_size"] == {"value": 2, "provenance": "detected"}
    assert inputs["compute_device"] == {"value": "cpu", "provenance": "detected"}
    assert inputs["local_world_size"] == {"value": 2, "provenance": "detected"}


def test_collective_plan_shards_as_plan_does_for_the_same_topology(pool: RankPool) -> None:
    (document, _) = pool.run(plan_workers.plan_json, 2)
    planner = EmbeddingShardingPlanner(Topology(2, "cpu"), constraints=plan_workers.constraints())
    plan = planner.plan(plan_workers.collection(), [EmbeddingBagCollectionSharder()])
    assert ShardingPlan.from_json(document) == plan


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"pattern": "user_*"}, "UnknownNameError: constraints['user_*'] is for no table of the model"),
        ({"topology_ranks": 3}, "PlanningError: the planner's topology has 3 ranks, the process group 2"),
    ],
)
def test_collective_plan_that_fails_is_the_same_error_on_every_rank(pool, arguments, text) -> None:
    own, other = pool.run(plan_workers.plan_json, 2, **arguments)
    assert own.startswith(text)
    assert other.startswith(f"{text.partition(':')[0]}: rank 1: planning failed: rank 0 raised {text}")


def test_collective_plan_of_a_type_that_looks_at_extras_and_data_type_is_read_on_every_rank(pool) -> None:
    documents = pool.run(plan_workers.plan_json_of_type, 2, name="as_asked")
    assert documents[0] == documents[1]
    tables = json.loads(documents[0])["modules"][""]
    assert [len(table["shards"]) for table in tables.values()] == [2, 2]


def test_collective_plan_that_cannot_be_read_back_is_the_same_error_on_every_rank(pool) -> None:
    texts = pool.run(plan_workers.plan_json_of_type, 2, name="forgetful")
    assert all(text.startswith("PlanError: ") and "'unwritten': " in text for text in texts)


@pytest.mark.parametrize("by_name", [True, False])
def test_model_parallel_over_a_comm_backend_that_was_asked_for_uses_it(pool: RankPool, by_name: bool) -> None:
    """The group is gloo's; what carries the tables' collectives is another, also while it plans."""
    for planning, training, shape in pool.run(plan_workers.step_over, 2, by_name=by_name):
        assert "broadcast_object" in planning
        assert {"all_to_all", "exchange"} & set(training)
        assert shape == [1, 3 * 64]


def test_model_parallel_over_a_comm_backend_that_cannot_be_is_refused(pool: RankPool) -> None:
    found = pool.run(plan_workers.wrong_backends, 1)[0]
    assert "no comm backend 'glo'. Known: gloo, nccl. Did you mean 'gloo'?" in found[0]
    assert "comm backend 'nccl' sends from cuda, not from cpu" in found[1]
    assert "comm_backend must be a comm backend or the name of one, got 5" in found[2]
    assert "comm backend already" in found[3]
