"""One process without a process group: ``ShardingEnv.local()`` plans, trains and saves as the unsharded model does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from tests.equality import Case, assert_equals_unsharded, train_rank
from tests.pairs import in_turns
from tests.plugins.training.test_equality import kernels, sharding_types, supports, tables_of

import shardwright as sw
from shardwright_testing.simulated import run_simulated

RATE = 0.5
LOCAL = sw.ShardingEnv.local(device_type="cpu")


@pytest.fixture(autouse=True)
def without_process_group() -> Iterator[None]:
    assert not dist.is_initialized()
    yield
    assert not dist.is_initialized()


class Clicks(torch.nn.Module):
    """Two tables and a dense layer."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.bags = sw.EmbeddingBagCollection(
            [
                sw.EmbeddingBagConfig(
                    name=f"t_{name}", num_embeddings=30, embedding_dim=8, feature_names=[name]
                )
                for name in ("user", "item")
            ],
            device=device,
        )
        self.over = torch.nn.Linear(16, 1, device=device)

    def forward(self, features: sw.KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.over(self.bags(features).values()).squeeze(1)
        return (output**2).mean(), output.detach()


def batches(count: int = 4) -> list[sw.KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 30, (7,), generator=generator) for _ in range(count)]
    lengths = torch.tensor([2, 0, 1, 1, 3, 0])
    return [sw.KeyedJaggedTensor(["user", "item"], values, lengths=lengths) for values in ids]


def trained_unsharded(model: Clicks) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for batch in batches():
        optimizer.zero_grad()
        model(batch)[0].backward()
        optimizer.step()
    return model.state_dict()


def sharded(env: sw.ShardingEnv = LOCAL) -> tuple[sw.DistributedModelParallel, Clicks]:
    """A model that planned itself, and the unsharded one of the same weights."""
    fused = {"optimizer": "sgd", "learning_rate": RATE}
    sharders = [sw.EmbeddingBagCollectionSharder(fused_params=fused)]
    model = sw.DistributedModelParallel(Clicks("meta"), env=env, sharders=sharders)
    unsharded = Clicks()
    unsharded.load_state_dict(model.full_state_dict())
    return model, unsharded


def dense_optimizer(model: sw.DistributedModelParallel) -> torch.optim.Optimizer:
    dense = sw.in_backward_optimizer_filter(model.named_parameters())
    return torch.optim.SGD([parameter for _, parameter in dense], lr=RATE)


@pytest.mark.parametrize(("kernel", "sharding_type"), in_turns(kernels(), sharding_types()))
def test_local_every_type_and_kernel_trains_as_the_unsharded_module(sharding_type: str, kernel: str) -> None:
    tables = tables_of(sharding_type, kernel)
    if not all(supports(kernel, table, "sgd", world_size=1) for table in tables):
        pytest.skip("they do not go together")
    case = Case(tables, (4,), "sgd")
    result = train_rank(case, LOCAL, case.module_to_shard(), lambda step: step() or 0)
    assert_equals_unsharded(case, [result], collectives=result.collectives)


def test_local_plans_by_itself_trains_saves_and_loads() -> None:
    model, unsharded = sharded()
    optimizer = dense_optimizer(model)
    for batch in batches():
        optimizer.zero_grad()
        model(batch)[0].backward()
        optimizer.step()
    expected = trained_unsharded(unsharded)
    assert list(model.full_state_dict()) == list(expected)
    torch.testing.assert_close(dict(model.full_state_dict()), dict(expected))
    other, _ = sharded()
    other.load_state_dict(expected)
    torch.testing.assert_close(dict(other.full_state_dict()), dict(expected))


def test_no_process_group_says_how_to_train_in_one_process() -> None:
    model, sharders = Clicks("meta"), [sw.EmbeddingBagCollectionSharder()]
    planner = sw.EmbeddingShardingPlanner()
    for make in (sw.DistributedModelParallel, lambda model: planner.collective_plan(model, sharders)):
        with pytest.raises(sw.DistributedError, match=r"torchrun.*env=ShardingEnv\.local\(\)"):
            make(model)


def test_simulated_ranks_without_a_plan_plan() -> None:
    first, second = run_simulated(lambda env: sw.DistributedModelParallel(Clicks("meta"), env=env).plan, 2)
    assert first == second
    assert set(first.plan["bags"]) == {"t_user", "t_item"}
