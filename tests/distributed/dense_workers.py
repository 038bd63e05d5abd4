"""What ranks do in the tests of dense gradients; importable by their processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from tests.distributed.failures.strikes import VICTIM, env_of, strike, told
from tests.distributed.workers import or_error

from shardwright import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    ShardingEnv,
)
from shardwright_plugins.dense_part import data_parallel as dense_sync


class Towers(torch.nn.Module):
    """Dense layers, whose gradients are made after those of a table.

    Args:
        width: of the layers; from 512 on they take more than one bucket (1 MiB the first).
        has_idle: a layer more, which takes no part.
    """

    def __init__(self, width: int = 2, *, has_idle: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.Linear(width, width), torch.nn.Linear(width, 1)
        )
        self.idle = torch.nn.Linear(width, width) if has_idle else None
        self.tables = EmbeddingBagCollection(
            [EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["a"])]
        )

    def forward(self, dense: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.dense(dense).sum() + self.tables(features).values().sum()


def _batch(rank: int, step: int, width: int) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    torch.manual_seed(10 * step + rank)
    return torch.randn(3, width), KeyedJaggedTensor(["a"], torch.tensor([rank]), lengths=torch.tensor([1]))


def _env_for(fault: str) -> ShardingEnv:
    """Ranks with the time-out for a fault, who have done everything once before: what is imported takes time."""
    warm = DistributedModelParallel(Towers())
    warm(*_batch(warm.env.rank, 0, 2)).backward()
    return env_of(fault)


WRAPPING = "wrapping the dense part of the model"


@or_error
def lose_a_rank(collective: str, fault: str) -> None:
    """Have a fault befall rank 1 before one of the collectives of the dense part."""
    env = _env_for(fault)

    def before(this: str) -> None:
        if this == collective:
            strike(fault)

    never = {"SHARDWRIGHT_COMPARE_REPLICAS_EVERY": "0"}  # which is a collective that comes before
    with mock.patch.dict(os.environ, never), told(), before_sums(lambda: before(dense_sync.GRADIENTS)):
        model = DistributedModelParallel(Towers(), env, init_data_parallel=False)
        before(WRAPPING)
        model.init_data_parallel()
        model(*_batch(env.rank, 0, 2)).backward()
        before(dense_sync.BUCKETS)
        model(*_batch(env.rank, 1, 2)).backward()


@contextmanager
def before_sums(act: Callable[[], Any]) -> Iterator[None]:
    """Something is done before each sum of a bucket."""
    start = dense_sync._Sums.start

    def acted(sums: dense_sync._Sums, bucket: Any) -> Any:
        act()
        return start(sums, bucket)

    with mock.patch.object(dense_sync._Sums, "start", acted):
        yield


def accumulate_gradients(width: int) -> tuple[list[int], list[float]]:
    """Backward passes of which every second is without sums; rank 1 comes late to each sum.

    Returns:
        How many sums each pass had; and, after each that had some, how far the gradients are from the mean of those
        that the ranks' batches have in the unsharded model.
    """
    env, num_sums, deviations = ShardingEnv.from_process_group(), [0], []
    reference = Towers(width).dense

    def note_and_linger() -> None:
        num_sums[-1] += 1
        time.sleep(0.05 * (env.rank == VICTIM))

    with before_sums(note_and_linger):
        model = DistributedModelParallel(Towers(width), env)
        for step in range(6):
            sums = nullcontext() if step % 2 else model._wrapper[0].no_sync()
            with sums:
                model(*_batch(env.rank, step, width)).backward()
            for rank in range(env.world_size):
                (reference(_batch(rank, step, width)[0]).sum() / env.world_size).backward()
            if step % 2:
                deviations.append(_deviation(model.module.dense, reference))
                model.module.dense.zero_grad()
                reference.zero_grad()
            num_sums.append(0)
    return num_sums[:-1], deviations


def _deviation(module: torch.nn.Module, other: torch.nn.Module) -> float:
    """The largest difference between the gradients of two modules."""
    pairs = zip(module.parameters(), other.parameters(), strict=True)
    return max(float((one.grad - two.grad).abs().max()) for one, two in pairs)


@or_error
def leave_a_layer_out() -> None:
    """Have a layer take no part in a step, and make the next."""
    model = DistributedModelParallel(Towers(has_idle=True))
    for step in range(2):
        model(*_batch(model.env.rank, step, 2)).backward()
