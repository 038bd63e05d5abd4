"""What the ranks of the collective planning tests do; importable by their processes."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests import as_asked
from tests.distributed import workers
from tests.distributed.workers import or_error
from tests.errors import error_of

from shardwright import (
    CommBackend,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    EmbeddingShardingPlanner,
    KeyedJaggedTensor,
    ParameterConstraints,
    Proposer,
    ShardingEnv,
    ShardingPlan,
    Topology,
)
from shardwright.host import host
from shardwright_testing import installed


def collection() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=f"t{i}", num_embeddings=100 * (i + 1), embedding_dim=64, feature_names=[f"f{i}"]
            )
            for i in range(3)
        ],
    )


def constraints(pattern: str = "t*") -> dict[str, ParameterConstraints]:
    return {pattern: ParameterConstraints(pooling_factors=[3.0])}


class Noted(CommBackend):
    """The collectives of gloo, with a note of each."""

    name = "noted"
    devices = ("cpu",)

    def __init__(self) -> None:
        self.calls: list[str] = []

    def connect(self, process_group: Any) -> Any:
        """The communicator of gloo, listened to."""
        communicator = host().comm_backends.create("gloo").connect(process_group)
        for name in ("all_to_all", "exchange", "broadcast_object"):
            setattr(communicator, name, partial(self._note, name, getattr(communicator, name)))
        return communicator

    def _note(self, name: str, collective: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(name)
        return collective(*args, **kwargs)


def step_over(*, by_name: bool) -> tuple[list[str], list[str], list[int]]:
    """What a comm backend that was asked for carried while planning, and in a step, and the shape of an output."""
    backend = Noted()
    with installed(backend):
        asked = "noted" if by_name else backend
        rules = {"*": ParameterConstraints(sharding_types=["row_wise"])}
        planner, sharders = EmbeddingShardingPlanner(constraints=rules), [EmbeddingBagCollectionSharder()]
        plan = planner.collective_plan(collection(), sharders, comm_backend=asked)
        planning = list(backend.calls)
        model = DistributedModelParallel(collection(), plan=plan, sharders=sharders, comm_backend=asked)
        features = KeyedJaggedTensor(
            ["f0", "f1", "f2"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 1, 1])
        )
        shape = list(model(features).values().shape)
    return planning, backend.calls[len(planning) :], shape


@or_error
def plan_json(topology_ranks: int | None = None, pattern: str = "t*") -> str:
    """The plan document that this rank gets."""
    topology: Any = topology_ranks and Topology(world_size=topology_ranks, compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints(pattern))
    sharders = [EmbeddingBagCollectionSharder()]
    return planner.collective_plan(collection(), sharders, dist.group.WORLD).to_json()


@or_error
def plan_json_of_type(name: str) -> str:
    """The plan document for two tables of a type that looks at extras and data types."""
    tables = [
        EmbeddingBagConfig(
            name=f"t{bits}",
            num_embeddings=100,
            embedding_dim=8,
            feature_names=[f"f{bits}"],
            data_type=f"FP{bits}",
        )
        for bits in (16, 32)
    ]
    rule = ParameterConstraints(sharding_types=[name], extras={"cut": True})
    with installed({"as_asked": as_asked.AsAsked, "forgetful": as_asked.Forgetful}[name]()):
        planner = EmbeddingShardingPlanner(constraints={"*": rule})
        module = EmbeddingBagCollection(device=torch.device("meta"), tables=tables)
        return planner.collective_plan(module, [EmbeddingBagCollectionSharder()]).to_json()


def wrong_backends() -> list[str]:
    """The errors of comm backends that do not go."""
    made = ShardingEnv.from_process_group()
    asked: list[tuple[Any, Any]] = [("glo", None), ("nccl", None), (5, None), ("gloo", made)]
    return [
        error_of(lambda own=own: DistributedModelParallel(collection(), env=own[1], comm_backend=own[0]))
        for own in asked
    ]


def planned(types: list[str]) -> str:
    """The plan document of the little model, with a sharding type for each of its tables."""
    sharders = [EmbeddingBagCollectionSharder(fused_params=workers.FUSED)]
    planner = workers.planner(dist.get_world_size(), types)
    return planner.collective_plan(workers.clicks(), sharders, dist.group.WORLD).to_json()


def train_from(document: str, steps: int) -> dict[str, torch.Tensor]:
    """The state of the little model after some steps under the plan in a document."""
    env = ShardingEnv.from_process_group()
    model = DistributedModelParallel(
        workers.clicks(),
        env=env,
        plan=ShardingPlan.from_json(document),
        sharders=[EmbeddingBagCollectionSharder(fused_params=workers.FUSED)],
        device=torch.device("cpu"),
    )
    optimizer = workers.optimizers_of(model)
    for step in range(steps):
        workers.train(model, step, dist.get_rank(), optimizer)
    return model.full_state_dict()


def train_on_hosts(document: str, steps: int, local_world_size: int) -> dict[str, torch.Tensor]:
    """The same, with so many ranks a host."""
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(local_world_size)}):
        return train_from(document, steps)


SHORT_S = 4.0  # time-out of the ranks that plan slowly


class Slow(Proposer):
    """Proposes the first options again and again, a little later each time."""

    name = "slow"

    def __init__(self, is_interrupted: bool, is_broken: bool) -> None:
        self.is_interrupted, self.is_broken = is_interrupted, is_broken

    def proposals(self, space: Any) -> Any:
        """Proposals without end, but for what happens to them."""
        proposal = space.options.first_option[:-1][space.options.distinct_table].copy()
        for count in range(1000):
            yield proposal.copy()
            time.sleep(0.1)
            if count == 5 and self.is_interrupted:
                os.kill(os.getpid(), signal.SIGINT)
            if count == 5 and self.is_broken:
                raise ZeroDivisionError("slow broke")


@workers.or_error
def plan_slowly(is_interrupted: bool = False, is_broken: bool = False, seconds: float | None = None) -> str:
    """The document that this rank gets."""
    planner = EmbeddingShardingPlanner(proposer=Slow(is_interrupted, is_broken), seconds=seconds)
    group = dist.new_group(timeout=timedelta(seconds=SHORT_S if seconds else 100.0))
    sharders = [EmbeddingBagCollectionSharder()]
    return planner.collective_plan(collection(), sharders, group).to_json()
