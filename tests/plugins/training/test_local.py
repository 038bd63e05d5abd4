"""One process without a process group, and any default dtype of torch: the model trains as the unsharded module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from tests.equality import Case, RankResult, assert_equals_unsharded, train_rank, train_simulated
from tests.pairs import each_once, in_turns
from tests.plugins.training.test_equality import kernels, sharding_types, supports, tables_of

import shardwright as sw
from shardwright.host import host

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


@pytest.fixture
def default_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def case_of(sharding_type: str, kernel: str) -> Case:
    optimizer = "row_wise_adagrad" if host().compute_kernels.create(kernel).fuses_optimizer else "sgd"
    cuts = sharding_type in ("column_wise", "table_column_wise", "grid_shard")
    return Case(
        tables_of(sharding_type, kernel),
        (3, 2, 0, 4),
        "sgd" if kernel == "fused" and cuts else optimizer,
        is_weighted=True,
        local_world_size=2,
    )


def assert_same(results: list[RankResult], expected: list[RankResult]) -> None:
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one.weights, other.weights, rtol=0, atol=0)
        for output, wanted in zip(one.outputs, other.outputs, strict=True):
            assert output.dtype is torch.float32
            assert torch.equal(output, wanted)


@pytest.mark.parametrize(
    ("sharding_type", "kernel", "dtype"),
    each_once(sharding_types(), kernels(), [torch.bfloat16, torch.float64]),
)
def test_training_under_another_default_dtype_gives_the_same_bits(
    default_dtype: None, sharding_type: str, kernel: str, dtype: torch.dtype
) -> None:
    case = case_of(sharding_type, kernel)
    expected = train_simulated(case)
    torch.set_default_dtype(dtype)
    assert_same(train_simulated(case), expected)
