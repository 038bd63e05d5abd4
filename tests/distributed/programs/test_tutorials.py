"""What TorchRec's tutorials show works here, in real processes over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.distributed.programs import tutorials

from shardwright import EmbeddingBagCollection, RowWiseAdagrad
from shardwright_testing.ranks import RankPool

pytestmark = pytest.mark.distributed

ROWS = {table.name: table.num_embeddings for table in tutorials.SHARDING_TABLES}


def shards_text(shards: list[tuple[list[int], list[int], int]]) -> str:
    listed = ", ".join(
        f"ShardMetadata(shard_offsets={offsets}, shard_sizes={sizes}, placement='rank:{rank}/cpu')"
        for offsets, sizes, rank in shards
    )
    return f"sharding_spec=EnumerableShardingSpec(shards=[{listed}])"


def sharded_as(name: str, rank: int) -> dict[str, list[tuple[list[int], list[int], int]]]:
    """The shards that the tutorial prints under a sharding type; `rank` is that of a whole table."""
    rows = ROWS[name]
    return {
        "TABLE_WISE": [([0, 0], [rows, 64], rank)],
        "ROW_WISE": [([0, 0], [rows // 2, 64], 0), ([rows // 2, 0], [rows // 2, 64], 1)],
        "COLUMN_WISE": [([0, 0], [rows, 32], 0), ([0, 32], [rows, 32], 1)],
    }


@pytest.mark.parametrize("sharding_type", ["TABLE_WISE", "ROW_WISE", "COLUMN_WISE"])
def test_sharding_tutorial_plans_and_shards_as_it_prints(pool: RankPool, sharding_type: str) -> None:
    ebc = EmbeddingBagCollection(device="cpu", tables=tutorials.SHARDING_TABLES)
    results = pool.run(tutorials.single_rank_execution, 2, sharding_type, ebc)
    (text,) = {text for text, *_ in results}
    for name in ROWS:
        # One large and one small table on each rank: which of them is the planner's choice.
        texts = [
            f"'{name}': ParameterSharding(sharding_type='{sharding_type.lower()}', compute_kernel='fused', "
            f"ranks={[rank for *_, rank in shards]}, {shards_text(shards)})"
            for shards in (sharded_as(name, rank)[sharding_type] for rank in (0, 1))
        ]
        assert any(candidate in text for candidate in texts), text
    for rank, (_, parameters, keys) in enumerate(results):
        assert keys == [table.feature_names[0] for table in tutorials.SHARDING_TABLES]
        here = {name.split(".")[1] for name in parameters}
        if sharding_type == "TABLE_WISE":
            assert sorted(name.split("_")[0] for name in here) == ["large", "small"], rank
        else:
            assert here == set(ROWS)


@pytest.mark.parametrize("world_size", [1, 2])
def test_introduction_sharded_collection_acts_as_the_unsharded_one(pool: RankPool, world_size: int) -> None:
    for seen in pool.run(tutorials.introduction_sharding, world_size):
        assert "LazyCall" in seen["printed"]
        assert (seen["type"], seen["keys"]) == ("KeyedTensor", ["product", "user"])
        assert seen["shapes"] == {"product": (2, 64), "user": (2, 64)}
        assert seen["equal"]
        assert seen["equal in model"]
        assert seen["anatomy"].startswith("ShardedEmbeddingBagCollection(")
        for name, text in zip(("InputDist", "Lookup", "OutputDist"), seen["dists"], strict=True):
            assert name in text
            assert name in seen["anatomy"]
        assert "product_table" in seen["plan"]
        assert seen["model"].startswith("DistributedModelParallel(")


def unsharded_pass(make_optimizer: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The first and second loss and the weights after a step, without sharding."""
    ebc = tutorials.introduction_collection()
    optimizer = make_optimizer(ebc.parameters())
    losses = []
    for _ in range(2):
        output = ebc(tutorials.introduction_batch()).values()
        losses.append(torch.sum(torch.ones_like(output) - output))
        if len(losses) == 1:
            losses[0].backward()
            optimizer.step()
    return [loss.item() for loss in losses], ebc.state_dict()


@pytest.mark.parametrize("torchs_function", [True, False], ids=["torch's", "ours"])
def test_introduction_optimizers_reach_the_kernels(pool: RankPool, torchs_function: bool) -> None:
    (seen,) = pool.run(tutorials.introduction_optimizers, 1, "row_wise_adagrad", torchs_function)
    tables = "embedding_bags.product_table.weight, embedding_bags.user_table.weight"
    assert seen["original"] == f"FusedOptimizer(\n  sgd(lr=0.01), by default: {tables}\n)"
    assert seen["fused params"] == f"FusedOptimizer(\n  row_wise_adagrad(lr=0.02, eps=0.002): {tables}\n)"
    assert seen["applied"] == f"FusedOptimizer(\n  sgd(lr=0.5): {tables}\n)"
    assert seen["is keyed"]
    assert seen["left over"] == []
    references = [
        lambda params: RowWiseAdagrad(params, lr=0.02, eps=0.002),
        lambda params: torch.optim.SGD(params, lr=0.5),
    ]
    for make_optimizer, losses, weights in zip(references, seen["losses"], seen["weights"], strict=True):
        expected_losses, expected = unsharded_pass(make_optimizer)
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        assert losses[1] < losses[0]
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight)
