"""collective_plan over real processes: one plan, or one error, for all ranks; training from plans edited by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.distributed.planning import plan_workers
from tests.distributed.test_training import assert_same_state, unsharded_after

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


def saved(pool: RankPool, types: list[str]) -> dict[str, Any]:
    return json.loads(pool.run(plan_workers.planned, 2, types)[0])


def tables(document: dict[str, Any]) -> dict[str, Any]:
    return document["modules"]["sparse.bags"]


def moved(document: dict[str, Any]) -> None:
    for table in tables(document).values():
        (shard,) = table["shards"]
        shard["rank"] = 1 - shard["rank"]


def cut_elsewhere(document: dict[str, Any]) -> None:
    user = tables(document)["user"]
    assert [shard["rows"] for shard in user["shards"]] == [[0, 25], [25, 50]]
    user["shards"][0]["rows"], user["shards"][1]["rows"] = [0, 7], [7, 50]


def of_another_type(document: dict[str, Any]) -> None:
    tables(document)["item"].update(
        sharding_type="row_wise",
        shards=[
            {"rank": 0, "rows": [0, 16], "columns": [0, 16]},
            {"rank": 1, "rows": [16, 31], "columns": [0, 16]},
        ],
    )


def of_a_type_that_would_not_cut_so(document: dict[str, Any]) -> None:
    tables(document)["user"]["sharding_type"] = "table_wise"


@pytest.mark.parametrize(
    ("types", "edit"),
    [
        (["row_wise", "table_wise"], lambda document: None),
        (["table_wise"], moved),
        (["row_wise"], cut_elsewhere),
        (["table_wise"], of_another_type),
        (["row_wise"], of_a_type_that_would_not_cut_so),
    ],
)
def test_training_from_a_saved_plan_that_was_edited_follows_its_shards(
    pool: RankPool, types: list[str], edit: Callable[[dict[str, Any]], None]
) -> None:
    document = saved(pool, types)
    edit(document)
    states = pool.run(plan_workers.train_from, 2, json.dumps(document), 3)
    expected = unsharded_after(range(3), 2)[0].state_dict()
    for state in states:
        assert_same_state(state, expected)


def test_training_from_a_plan_whose_host_sums_are_spread_over_hosts(pool: RankPool) -> None:
    """The dataflow adds sums inside each host that has row parts; nothing says that it is one host."""
    document = saved(pool, ["table_wise"])
    document["topology"].update(world_size=4, local_world_size=2)
    tables(document)["user"].update(
        sharding_type="table_row_wise",
        dataflow={"name": "hierarchical"},
        shards=[
            {"rank": 1, "rows": [0, 20], "columns": [0, 8]},
            {"rank": 2, "rows": [20, 50], "columns": [0, 8]},
        ],
    )
    for state in pool.run(plan_workers.train_on_hosts, 4, json.dumps(document), 3, 2):
        assert_same_state(state, unsharded_after(range(3), 4)[0].state_dict())


@pytest.mark.slow
def test_collective_plan_that_takes_longer_than_the_time_out_is_waited_for(pool: RankPool) -> None:
    seconds = 1.2 * plan_workers.SHORT_S
    documents = pool.run(plan_workers.plan_slowly, 2, seconds=seconds)
    assert documents[0] == documents[1]
    assert json.loads(documents[0])["inputs"]["seconds_limit"]["value"] == seconds


def test_collective_plan_interrupted_on_rank_0_is_the_best_so_far_everywhere(pool: RankPool) -> None:
    documents = pool.run(plan_workers.plan_slowly, 2, is_interrupted=True)
    assert documents[0] == documents[1]
    assert json.loads(documents[0])["modules"]


def test_collective_plan_that_breaks_late_is_an_error_everywhere(pool: RankPool) -> None:
    own, other = pool.run(plan_workers.plan_slowly, 2, is_broken=True)
    assert own == "PlanningError: proposer 'slow' failed: ZeroDivisionError: slow broke"
    assert other == f"PlanningError: rank 1: planning failed: rank 0 raised {own}"
