"""One process without a process group: ``ShardingEnv.local()`` trains as the unsharded module; else it is asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from tests.equality import Case, assert_equals_unsharded, train_rank
from tests.pairs import in_turns
from tests.plugins.training.test_equality import kernels, sharding_types, supports, tables_of

import shardwright as sw
from shardwright_testing.simulated import run_simulated

LOCAL = sw.ShardingEnv.local(device_type="cpu")


@pytest.fixture(autouse=True)
def without_process_group() -> Iterator[None]:
    assert not dist.is_initialized()
    yield
    assert not dist.is_initialized()


def bags() -> sw.EmbeddingBagCollection:
    """Two tables, on meta."""
    tables = [
        sw.EmbeddingBagConfig(name=name, num_embeddings=30, embedding_dim=8, feature_names=[name])
        for name in ("user", "item")
    ]
    return sw.EmbeddingBagCollection(tables, device="meta")


@pytest.mark.parametrize(("kernel", "sharding_type"), in_turns(kernels(), sharding_types()))
def test_local_every_type_and_kernel_trains_as_the_unsharded_module(sharding_type: str, kernel: str) -> None:
    tables = tables_of(sharding_type, kernel)
    if not all(supports(kernel, table, "sgd", world_size=1) for table in tables):
        pytest.skip("they do not go together")
    case = Case(tables, (4,), "sgd")
    result = train_rank(case, LOCAL, case.module_to_shard(), lambda step: step() or 0)
    assert_equals_unsharded(case, [result], collectives=result.collectives)


def test_no_process_group_says_how_to_train_in_one_process() -> None:
    model, sharders = bags(), [sw.EmbeddingBagCollectionSharder()]
    planner = sw.EmbeddingShardingPlanner()
    for make in (sw.DistributedModelParallel, lambda model: planner.collective_plan(model, sharders)):
        with pytest.raises(sw.DistributedError, match=r"torchrun.*env=ShardingEnv\.local\(\)"):
            make(model)


def test_simulated_ranks_without_a_plan_plan() -> None:
    first, second = run_simulated(lambda env: sw.DistributedModelParallel(bags(), env=env).plan, 2)
    assert first == second
    assert set(first.plan[""]) == {"user", "item"}
