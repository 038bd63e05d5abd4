"""A model with two collections and a dense rest, its batches, and loops over them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from tests.core.runtime.plans import RATE, SHARDER, Cut, Cuts
from torch import nn

from shardwright import (
    DistributedModelParallel,
    EmbeddingCollectionSharder,
    EmbeddingModuleShardingPlan,
    KeyedJaggedTensor,
    RowsModulo,
    ShardingPlan,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from shardwright_plugins.dataflows import Hierarchical, Replicate
from shardwright_testing.simulated import run_simulated

SHARDERS = [SHARDER, EmbeddingCollectionSharder(fused_params={"optimizer": "sgd", "learning_rate": RATE})]


def bags(world_size: int) -> Cuts:
    ranks = tuple(range(world_size))
    return Cuts(
        [
            Cut(11, 4, ("a",), "SUM", RowsModulo(11, parts=world_size), (), ranks),
            Cut(9, 6, ("b", "a"), "MEAN", None, (2,), (world_size - 1, 0), "loop_by_sample"),
            Cut(7, 2, ("b",), "SUM", ranks=ranks, dataflow=Replicate()),
            Cut(8, 2, ("b",), "SUM", RowsModulo(8, parts=world_size), (), ranks, dataflow=Hierarchical()),
        ],
        world_size,
    )


def sequences(world_size: int) -> Cuts:
    return Cuts([Cut(6, 3, ("s",), "NONE", ranks=(world_size - 1,))], world_size)


@attrs.define(eq=False)
class Examples:
    """A batch as users write them."""

    dense: torch.Tensor
    sparse: dict[str, KeyedJaggedTensor]
    name: str


class TwoTowers(nn.Module):
    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.bags = bags(world_size).module()
        self.sequences = sequences(world_size).module()
        torch.manual_seed(5)
        self.over = nn.Linear(20 + 2, 3)

    def forward(self, examples: Examples) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.bags(examples.sparse["bags"])
        rows = self.sequences(examples.sparse["rows"])["s"].values()
        output = self.over(torch.cat([pooled.values(), examples.dense], 1))
        return output.square().mean(1) + rows.square().sum() / 8, output.detach()


def towers(world_size: int) -> TwoTowers:
    return TwoTowers(world_size)


def shard(model: nn.Module, env: Any, world_size: int) -> DistributedModelParallel:
    cases = {"bags": bags(world_size), "sequences": sequences(world_size)}
    plan = {path: EmbeddingModuleShardingPlan(case.shardings()) for path, case in cases.items()}
    return DistributedModelParallel(
        copy.deepcopy(model), env=env, device="cpu", plan=ShardingPlan(plan), sharders=SHARDERS
    )


def examples(step: int, rank: int, world_size: int, size: int | None = None) -> Examples:
    """A batch; ranks and steps have batches of different sizes."""
    size = 1 + (step + rank) % 3 if size is None else size
    seed = 100 * step + rank
    generator = torch.Generator().manual_seed(seed)
    return Examples(
        torch.rand((size, 2), generator=generator),
        {
            "rows": sequences(world_size).batch(size, seed=seed),
            "bags": bags(world_size).batch(size, seed=seed),
        },
        f"{step} of {rank}",
    )


def batches(num_steps: int, rank: int, world_size: int, start: int = 0) -> Iterator[Examples]:
    return iter([examples(step, rank, world_size) for step in range(start, start + num_steps)])


def dense_optimizer(model: DistributedModelParallel) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.module.over.parameters(), lr=RATE)


def train_plainly(model: Any, loader: Iterator[Any]) -> list[torch.Tensor]:
    optimizer = dense_optimizer(model)
    outputs = []
    for batch in loader:
        optimizer.zero_grad()
        losses, output = model(batch)
        losses.sum().backward()
        optimizer.step()
        outputs.append(output)
    return outputs


def run_out(pipeline: Any, loader: Iterator[Any]) -> list[Any]:
    """Progress until the end of data; returns the outputs."""
    outputs = []
    while True:
        try:
            outputs.append(pipeline.progress(loader))
        except StopIteration:
            return outputs


def assert_same(actual: Any, expected: Any) -> None:
    """Bit for bit."""
    assert list(actual) == list(expected)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


class Watched:
    """A communicator's collectives, as they are started and waited for."""

    def __init__(self, communicator: Any) -> None:
        self.events: list[tuple[str, str]] = []
        start = communicator.all_to_all

        def all_to_all(*args: Any, label: str = "", **kwargs: Any) -> Any:
            self.events.append(("start", label))
            return _WatchedWork(start(*args, label=label, **kwargs), label, self.events)

        communicator.all_to_all = all_to_all

    def clear(self) -> None:
        self.events.clear()


class _WatchedWork:
    def __init__(self, work: Any, label: str, events: list[tuple[str, str]]) -> None:
        self._work, self._label, self._events = work, label, events

    def wait(self) -> Any:
        self._events.append(("wait", self._label))
        return self._work.wait()


PIPELINES = [TrainPipelineSparseDist, TrainPipelineBase]


def on_ranks(work: Any, world_size: int, model: nn.Module | None = None, **options: Any) -> list[Any]:
    """Call `work(sharded, env)` on every rank."""
    whole = model or towers(world_size)
    return run_simulated(lambda env: work(shard(whole, env, world_size), env), world_size, **options)


def assert_trains_as_the_plain_loop(
    train: Any, own: Any, world_size: int = 2, model: nn.Module | None = None
) -> list[Any]:
    """Compare `train(sharded, env)` with a plain loop over the batches `own(rank)`, bit for bit.

    Returns:
        What `train` returned, by rank.
    """

    def trained(sharded: Any, env: Any) -> tuple[Any, Any]:
        return train(sharded, env), sharded.full_state_dict()

    def plainly(sharded: Any, env: Any) -> Any:
        train_plainly(sharded, iter(own(env.rank)))
        return sharded.full_state_dict()

    results = on_ranks(trained, world_size, model)
    for (_, actual), expected in zip(results, on_ranks(plainly, world_size), strict=True):
        assert_same(actual, expected)
    return [returned for returned, _ in results]


def piped(model: Any, kind: Any = TrainPipelineSparseDist, **options: Any) -> Any:
    return kind(model, dense_optimizer(model), "cpu", **options)


class Fails(nn.Module):
    """A model that raises on one rank in one step, before, between or after its collections' forward passes."""

    def __init__(self, towers: Any, where: str) -> None:
        super().__init__()
        self.bags, self.sequences, self.over = towers.bags, towers.sequences, towers.over
        self.where, self.when = where, ""

    def _maybe(self, batch: Any, where: str) -> None:
        if (where, batch.name) == (self.where, self.when):
            raise ArithmeticError(f"in {batch.name}")

    def forward(self, batch: Any) -> Any:
        self._maybe(batch, "before")
        pooled = self.bags(batch.sparse["bags"])
        self._maybe(batch, "between")
        rows = self.sequences(batch.sparse["rows"])["s"].values()
        output = self.over(torch.cat([pooled.values(), batch.dense], 1))
        self._maybe(batch, "after")
        return output.square().mean(1) + rows.square().sum() / 8, output.detach()
