"""Ids sent once a batch: the same training as by one process, with fewer bytes, under every sharding type."""

from __future__ import annotations

from collections import Counter
from typing import Any

import attrs
import pytest
import shardwright_dedup
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.equality import Case, Table, train_simulated
from tests.plugins.built_in import built_in

import shardwright as sw
from shardwright_testing.equality.cases import shard_case
from shardwright_testing.equality.random_cases import training_cases
from shardwright_testing.equality.training import assert_equals_unsharded
from shardwright_testing.simulated import run_simulated

TYPES = built_in("sharding_types")
ADAGRAD = {"optimizer": "adagrad", "learning_rate": 0.1}


@attrs.frozen
class DedupCase(Case):
    """A case that is sharded by the dedup sharder."""

    def sharder(self) -> sw.ModuleSharder:
        return shardwright_dedup.DedupEmbeddingCollectionSharder(self.fused_params)


def dedup(case: Case) -> DedupCase:
    return DedupCase(**{field.name: getattr(case, field.name) for field in attrs.fields(Case) if field.init})


def zipf_case(sharding_type: str) -> DedupCase:
    """Popular ids: bags of up to 12 ids of 5 rows."""
    table = Table(5, 4, ("f", "g"), "NONE", sharding_type, "fused_torch")
    return DedupCase([table, attrs.evolve(table, features=("g",), dim=8)], (6, 3), max_length=12)


@settings(max_examples=40)
@given(case=training_cases(TYPES, kernels=["fused_torch"], mode="sequence"))
def test_drawn_training_equals_one_process(case: Case) -> None:
    assert_equals_unsharded(dedup(case), train_simulated(dedup(case)))


def sent_bytes(case: Case) -> Counter[str]:
    """The bytes that all ranks sent in one forward and backward pass, by the label's first word."""
    module = case.module_to_shard()

    def step(env: sw.ShardingEnv) -> Counter[str]:
        communicator: Any = env.communicator
        sharded = shard_case(case, env, module)
        first = len(communicator.sent_bytes)
        values = case.output(sharded(case.batch(0, env.rank)))
        values.backward(torch.ones_like(values))
        counted: Counter[str] = Counter()
        for label, by_rank in communicator.sent_bytes[first:]:
            counted[label.split()[0]] += sum(by_rank)
        return counted

    return sum(run_simulated(step, case.world_size), Counter())


@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise", "column_wise"])
def test_results_and_gradients_travel_once_for_each_distinct_id(sharding_type: str) -> None:
    case = zipf_case(sharding_type)
    plain = Case(**{field.name: getattr(case, field.name) for field in attrs.fields(Case) if field.init})
    few, many = sent_bytes(case), sent_bytes(plain)
    pairs = [(feature, table.dim) for table in case.tables for feature in table.features]
    batches = [case.batch(0, rank) for rank in range(case.world_size)]
    expected = {
        "few": sum(4 * dim * len(own[name].values().unique()) for own in batches for name, dim in pairs),
        "many": sum(4 * dim * len(own[name].values()) for own in batches for name, dim in pairs),
    }
    vectors = ("results", "gradients")
    assert expected["few"] * 2 < expected["many"]
    assert [few[word] for word in vectors] == [expected["few"]] * 2, (few, many)
    assert [many[word] for word in vectors] == [expected["many"]] * 2, (few, many)


@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise", "column_wise"])
def test_plan_by_distinct_ids_predicts_the_bytes_of_results_that_travel(sharding_type: str) -> None:
    case = attrs.evolve(zipf_case(sharding_type), batch_sizes=(6, 6))
    factors = shardwright_dedup.distinct_pooling_factors(case.batch(0, rank) for rank in range(2))
    rules = {
        spec.path: sw.ParameterConstraints(
            sharding_types=[sharding_type],
            compute_kernels=["fused_torch"],
            pooling_factors=[factors[feature] for feature in spec.feature_names],
            min_partition=1,
        )
        for spec in case.specs()
    }
    planner = sw.EmbeddingShardingPlanner(sw.Topology(2, "cpu"), batch_size=6, constraints=rules)
    planner.plan(case.module_to_shard(), [case.sharder()])
    assert planner.report is not None
    predicted = sum(rank["output_bytes"] for rank in planner.report.to_data()["ranks"])
    assert predicted == pytest.approx(sent_bytes(case)["results"])


def test_indices_and_lengths_are_those_of_the_batch_and_bad_ids_are_named() -> None:
    table = sw.EmbeddingConfig(9, 4, "t", feature_names=["f"])
    env = sw.ShardingEnv.local(device_type="cpu")
    sharders = [shardwright_dedup.DedupEmbeddingCollectionSharder(ADAGRAD)]
    collection = sw.EmbeddingCollection([table], need_indices=True)
    expected = collection.embeddings["t"].weight.detach().clone()
    model = sw.DistributedModelParallel(collection, env=env, sharders=sharders)
    ids = sw.KeyedJaggedTensor.from_lists({"f": [[8, 8], [], [1, 8]]})
    found = model(ids)["f"]
    assert found.lengths().tolist() == [2, 0, 2]
    assert found.weights().tolist() == [8, 8, 1, 8]
    assert torch.equal(found.values(), expected[[8, 8, 1, 8]])
    with pytest.raises(sw.IdRangeError, match=r"9.*'t'|'t'.*9"):
        model(sw.KeyedJaggedTensor.from_lists({"f": [[1, 9], [9]]}))
    with pytest.raises(sw.InvalidInputError, match="KeyedJaggedTensor"):
        model(torch.ones(3))


@pytest.mark.parametrize(
    ("values", "length", "device"),
    [([1, 2], 5, "cpu"), ([1, 2], -1, "cpu"), ([1, 2, 3], 1, "cpu"), ([1, 2], 2, "meta")],
    ids=["too few", "negative", "too many", "without values"],
)
def test_batch_that_cannot_be_looked_up_is_the_same_error_on_all_ranks(
    values: list[int], length: int, device: str
) -> None:
    case = DedupCase([Table(9, 4, ("f",), "NONE", "row_wise", "fused_torch")], (1, 1))
    wrong = sw.KeyedJaggedTensor(keys=["f"], values=torch.tensor(values), lengths=torch.tensor([length]))
    wrong = wrong.to(device)
    module = case.module_to_shard()

    def look_up(env: sw.ShardingEnv) -> str:
        sharded = shard_case(case, env, module)
        with pytest.raises(sw.InvalidInputError) as caught:
            sharded(wrong if env.rank else case.batch(0, 0))["f"]
        return str(caught.value)

    texts = run_simulated(look_up, 2)
    assert len(set(texts)) == 1
    assert "rank 1" in texts[0]


def test_clipped_gradients_of_outputs_are_refused() -> None:
    table = sw.EmbeddingConfig(9, 4, "t", feature_names=["f"])
    sharders = [shardwright_dedup.DedupEmbeddingCollectionSharder({**ADAGRAD, "max_gradient": 1.0})]
    env = sw.ShardingEnv.local(device_type="cpu")
    with pytest.raises(sw.UnsupportedError) as caught:
        sw.DistributedModelParallel(sw.EmbeddingCollection([table]), env=env, sharders=sharders)
    assert (caught.value.subject, caught.value.asked) == ("t", "max_gradient")


@given(
    st.lists(
        st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=3, max_size=3), min_size=1, max_size=4
    )
)
def test_pooling_factors_are_means_of_distinct_ids(batches: list[list[list[int]]]) -> None:
    found = shardwright_dedup.distinct_pooling_factors(
        sw.KeyedJaggedTensor.from_lists({"f": bags}) for bags in batches
    )
    shares = [len({each for bag in bags for each in bag}) / 3 for bags in batches]
    assert found["f"] == pytest.approx(sum(shares) / len(shares))


def test_pooling_factors_of_no_batch_are_an_error() -> None:
    with pytest.raises(sw.InvalidInputError):
        shardwright_dedup.distinct_pooling_factors([])
