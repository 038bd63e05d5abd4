"""What the ranks do in the tests of sharding groups; importable by their processes."""

from __future__ import annotations

import os
import signal
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.distributed import workers
from tests.distributed.failures.strikes import strike, time_out, told
from tests.distributed.pipelines.pipeline_workers import KINDS, WithLoss, examples, run_loop

from shardwright import (
    DefaultDataParallelWrapper,
    EmbeddingBagCollectionSharder,
    EmbeddingShardingPlanner,
    KeyedJaggedTensor,
    ParameterConstraints,
    ShardwrightError,
    Topology,
    clip_grad_norm_,
)
from shardwright_plugins.sharding_groups import DMPCollection

GROUP = 2
VICTIM = 3
TYPES = ["row_wise", "table_wise", "data_parallel"]
SGD = {"optimizer": "sgd", "learning_rate": workers.LEARNING_RATE}


def sharded(model: torch.nn.Module, **options: Any) -> DMPCollection:
    """A model over two groups of two ranks, planned as TorchRec's users do: for all ranks, on one of them."""
    rules = {
        name: ParameterConstraints(sharding_types=[TYPES[index % len(TYPES)]])
        for index, (name, *_) in enumerate(workers.TABLES)
    }
    topology = Topology(dist.get_world_size(), "cpu").sharding_group(GROUP, sync_every=1)
    sharders = [EmbeddingBagCollectionSharder(fused_params=SGD)]
    planner = EmbeddingShardingPlanner(topology=topology, constraints=rules, batch_size=6)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return DMPCollection(
        model,
        torch.device("cpu"),
        plan,
        dist.get_world_size(),
        GROUP,
        dist.group.WORLD,
        sharders=sharders,
        **options,
    )


def train_with_sync(steps: int, *, is_inter_host: bool) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Train a model with a dense part, averaged by hand after each step; and this rank's replicas.

    The groups begin with other weights: those of the first are those of all.
    """
    group = dist.get_rank() // GROUP if is_inter_host else dist.get_rank() % 2
    model = sharded(
        workers.clicks(3 + group),
        use_inter_host_allreduce=is_inter_host,
        data_parallel_wrapper=DefaultDataParallelWrapper(find_unused_parameters=True),
    )
    assert model._wrapper[0].find_unused_parameters
    optimizer = workers.optimizers_of(model)
    for step in range(steps):
        workers.train(model, step, dist.get_rank(), optimizer)
        model.sync()
    replicas = model.env.replicas.communicator  # type: ignore[attr-defined]
    return model.full_state_dict(), list(replicas.global_ranks)


def clipped() -> list[float]:
    """Norms of all gradients, as this library's function and torch's take them."""
    model = sharded(workers.clicks(), update="in_step")
    model(workers.batch(0, dist.get_rank())).square().mean().backward()
    clips = (clip_grad_norm_, torch.nn.utils.clip_grad_norm_)
    return [float(clip(model.parameters(), 1e6)) for clip in clips]


def train_loop(loop: str, counts: list[int], end_of_data: str) -> tuple[int, dict[str, torch.Tensor]]:
    """Train until the data ends, of which ranks have different amounts; returns the steps made, and the state."""
    model = sharded(WithLoss(), sync_every=1)
    steps = run_loop(loop, model, workers.optimizers_of(model), counts, end_of_data)
    return steps, model.full_state_dict()


def train_past_a_wrong_batch(loop: str, steps: int) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Train with a batch that is wrong on one rank; returns what was raised, and the state."""
    model = sharded(WithLoss(), sync_every=1)
    optimizer = workers.optimizers_of(model)
    rank = dist.get_rank()
    batches = list(examples(steps, rank))
    if rank == VICTIM:
        features = batches[2].features
        values = features.values().clone()
        values[0] = 10**6
        batches[2] = type(batches[2])(
            KeyedJaggedTensor(keys=features.keys(), values=values, lengths=features.lengths()),
            batches[2].labels,
        )
    pipeline, raised = KINDS[loop](model, optimizer, "cpu"), []
    iterator = iter(batches)
    while True:
        try:
            pipeline.progress(iterator)
        except StopIteration:
            return raised, model.full_state_dict()
        except ShardwrightError as error:
            raised.append(f"{type(error).__name__}: {error}")


def lose_a_rank(fault: str) -> str:
    """Average twice; in the second a rank is killed, or does not come. Returns what the others raise."""
    short = dist.new_group(list(range(dist.get_world_size())), timeout=time_out(fault, 8.0))
    model = DMPCollection(
        workers.clicks(),
        "cpu",
        sharding_group_size=GROUP,
        global_pg=short,
        sharders=[EmbeddingBagCollectionSharder(fused_params=SGD)],
    )
    optimizer = workers.optimizers_of(model)
    workers.train(model, 0, dist.get_rank(), optimizer)
    model.sync()
    workers.train(model, 1, dist.get_rank(), optimizer)
    if fault != "kill between parts and means":
        strike(fault, victim=VICTIM)
    elif dist.get_rank() == VICTIM:
        communicator = model._averaging._env.replicas.communicator
        sent = communicator.exchange

        def kill_before_means(*args: Any, label: str, **keywords: Any) -> Any:
            if label.startswith("sums of"):
                os.kill(os.getpid(), signal.SIGKILL)
            return sent(*args, label=label, **keywords)

        mock.patch.object(communicator, "exchange", kill_before_means).start()
    if dist.get_rank() == VICTIM and fault == "stall":
        return "stuck"
    try:
        with told():
            model.sync()
    except ShardwrightError as error:
        return f"{error}"
    return "averaged"


@workers.or_error
def average_after_different_steps() -> None:
    DMPCollection(workers.clicks(), "cpu", sharding_group_size=2, sync_every=1 + dist.get_rank() % 2)


@workers.or_error
def ask_for_different_groups() -> None:
    DMPCollection(workers.clicks(), "cpu", sharding_group_size=2 if dist.get_rank() else 4)
