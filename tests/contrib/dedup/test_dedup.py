"""Ids sent once a batch: trained as by one process, with fewer bytes; their counts reach a stranger's kernel."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import pytest
import shardwright_dedup
import shardwright_hash_embedding
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shardwright_dedup import DedupEmbeddingCollectionSharder
from shardwright_hash_embedding import HashSettings
from tests.equality import Case, Table, train_simulated
from tests.plugins.built_in import built_in

import shardwright as sw
from shardwright.host import PluginHost, use_host
from shardwright_testing import RankPool
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


STEPS, KEYS = 4, 40
FUSED = {"optimizer": "sgd", "learning_rate": 0.25}


def batch(step: int, rank: int) -> sw.KeyedJaggedTensor:
    """Four bags of six keys of two features, some of them often."""
    drawn = np.random.default_rng(10 * step + rank).random(48) ** 2 * KEYS
    keys = torch.from_numpy(drawn.astype(np.int64)) * 1_000_003
    return sw.KeyedJaggedTensor(["a", "b"], keys, lengths=torch.full((8,), 6, dtype=torch.int32))


def trained(*, is_dedup: bool, count_column: str = "", counts: int = 0) -> dict[int, tuple[Any, ...]]:
    """Train on this rank; uses and row of each key.

    Args:
        is_dedup: distinct keys are sent.
        count_column: column that the table asks for.
        counts: number of sightings that the batch says each id stands for; 0 if it says nothing.
    """
    table = sw.EmbeddingConfig(200, 4, "item", feature_names=["a", "b"])
    kind = DedupEmbeddingCollectionSharder if is_dedup else sw.EmbeddingCollectionSharder
    rules = HashSettings("lfu", min_sightings=5, count_column=count_column)
    with use_host(PluginHost(plugins={"hash_embedding": shardwright_hash_embedding})):
        planner = sw.EmbeddingShardingPlanner(batch_size=4, constraints={"item": rules.constraints()})
        module, sharders = sw.EmbeddingCollection([table], device="meta"), [kind(FUSED)]
        plan = planner.collective_plan(module, sharders)
        model = sw.DistributedModelParallel(module, plan=plan, sharders=sharders)
        for step in range(STEPS):
            own = batch(step, torch.distributed.get_rank())
            if counts:
                columns = {count_column: torch.full_like(own.values(), counts)}
                own = sw.KeyedJaggedTensor(own.keys(), own.values(), lengths=own.lengths(), columns=columns)
            outputs = model(own)
            sum((rows.values() ** 2).sum() for rows in outputs.values()).backward()
        state = model.full_state_dict()
    uses, keys, rows = (state[f"embeddings.item.{name}"] for name in ("row_uses", "row_keys", "weight"))
    used = uses.squeeze(1) > 0
    pairs = zip(uses[used].flatten().tolist(), rows[used].tolist(), strict=True)
    return dict(zip(keys[used].flatten().tolist(), pairs, strict=True))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, backend="gloo", initializer=functools.partial(sys.path.extend, list(sys.path))) as made:
        yield made


def train(pool: RankPool, **how: Any) -> dict[int, tuple[int, list[float]]]:
    first, second = pool.run(functools.partial(trained, **how), 2)
    assert first == second
    return first


def sightings(least: int = 1) -> dict[int, int]:
    """Sightings of each key that is seen so often or more."""
    batches = [batch(step, rank).values() for step in range(STEPS) for rank in range(2)]
    every = Counter(torch.cat(batches).tolist())
    return {key: seen for key, seen in every.items() if seen >= least}


@pytest.mark.distributed
def test_deduplicated_ids_bear_and_use_rows_as_all_ids_do(pool: RankPool) -> None:
    plain, counted = train(pool, is_dedup=False), train(pool, is_dedup=True, count_column="count")
    uses = {key: seen for key, (seen, _) in plain.items()}
    assert uses == sightings(5)
    assert len(uses) < KEYS
    assert {key: seen for key, (seen, _) in counted.items()} == uses
    for key, (_, row) in plain.items():
        torch.testing.assert_close(torch.tensor(counted[key][1]), torch.tensor(row))
    unasked = train(pool, is_dedup=True)  # a key is seen once a batch and feature then
    assert sum(seen for seen, _ in unasked.values()) < sum(uses.values())


@pytest.mark.distributed
@pytest.mark.parametrize("is_dedup", [False, True])
def test_counts_of_the_batch_are_added_up(pool: RankPool, is_dedup: bool) -> None:
    found = train(pool, is_dedup=is_dedup, count_column="count", counts=5)
    assert {key: seen for key, (seen, _) in found.items()} == {
        key: 5 * seen for key, seen in sightings().items()
    }
