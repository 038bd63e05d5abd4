"""What the ranks of the distributed tests do; importable by their processes."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, ParamSpec
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from attrs import evolve
from tests.equality import Case, RankResult, count_profiled, train_rank
from tests.errors import error_of
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from shardwright import (
    CombinedOptimizer,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    EmbeddingShardingPlanner,
    KeyedJaggedTensor,
    KeyedOptimizerWrapper,
    ParameterConstraints,
    ShardingEnv,
    Topology,
    in_backward_optimizer_filter,
)
from shardwright.host import PluginHost, host, use_host
from shardwright.runtime.ranks.group_store import store_of
from shardwright_plugins.comm_backends.settings import SHARED_MEMORY_VARIABLE

P = ParamSpec("P")
TABLES = [("user", 50, 8, ["user"]), ("item", 31, 16, ["item", "liked"]), ("shop", 2, 8, ["shop"])]
FEATURES = ["user", "item", "liked", "shop"]
LEARNING_RATE = 0.1
FUSED = {"optimizer": "row_wise_adagrad", "learning_rate": LEARNING_RATE}


def or_error(function: Callable[P, str | None]) -> Callable[P, str]:
    """Have what ranks do answer with the error that it raises, as :func:`error_of`."""

    @functools.wraps(function)
    def answer(*args: P.args, **keywords: P.kwargs) -> str:
        answers: list[str | None] = []
        text = error_of(lambda: answers.append(function(*args, **keywords)))
        return answers[0] or text if answers else text

    return answer


def hide_fbgemm() -> None:
    """Make ``import fbgemm_gpu`` fail in this process."""
    sys.modules["fbgemm_gpu"] = None  # type: ignore[assignment]


def train_case(case: Case) -> RankResult:
    return train_rank(case, ShardingEnv.from_process_group(), case.module(), count_profiled)


def train_case_over(backend: str, case: Case) -> RankResult:
    """Train with the communicator of the registered comm backend of that name."""
    env = ShardingEnv.from_process_group()
    own = host().comm_backends.create(backend).connect(dist.group.WORLD)
    return train_rank(case, evolve(env, communicator=own), case.module(), count_profiled)


def train_case_on_hosts(case: Case, shared_memory: str = "on") -> RankResult:
    """Train with as many ranks a host as the case says; the launcher's variable is all that tells hosts apart."""
    told = {"LOCAL_WORLD_SIZE": str(case.local_world_size), SHARED_MEMORY_VARIABLE: shared_memory}
    with mock.patch.dict(os.environ, told):
        return train_case(case)


class Clicks(nn.Module):
    """A small model with a collection two levels down, and a dense rest."""

    def __init__(self, device: str) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features)
            for name, rows, dim, features in TABLES
        ]
        self.sparse = nn.Module()
        self.sparse.bags = EmbeddingBagCollection(configs, device=device)
        self.over = nn.Linear(48, 1, device=device)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.sparse.bags(features).values()).squeeze(1)


def clicks(seed: int = 3) -> Clicks:
    torch.manual_seed(seed)
    return Clicks("cpu")


def batch(step: int, rank: int, batch_size: int = 6) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 3, (len(FEATURES), batch_size), generator=generator)
    rows = {"user": 50, "item": 31, "liked": 31, "shop": 2}
    values = [
        torch.randint(0, rows[feature], (int(own.sum()),), generator=generator)
        for feature, own in zip(FEATURES, lengths, strict=True)
    ]
    return KeyedJaggedTensor(
        keys=FEATURES, values=torch.cat(values), lengths=lengths.flatten().to(torch.int32)
    )


def planner(
    world_size: int, types: list[str] | None, kernels: list[str] | None = None, device: str = "cpu"
) -> EmbeddingShardingPlanner:
    constraints = {
        name: ParameterConstraints(
            sharding_types=[types[index % len(types)]] if types else None,
            compute_kernels=kernels,
            min_partition=4,
        )
        for index, (name, *_) in enumerate(TABLES)
    }
    return EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, compute_device=device), constraints=constraints, batch_size=6
    )


def wrap(
    model: nn.Module, types: list[str] | None, fused_params: dict[str, Any] | None = FUSED, **options: Any
) -> DistributedModelParallel:
    env = ShardingEnv.from_process_group()
    sharders = [EmbeddingBagCollectionSharder(fused_params=fused_params)]
    plan = planner(env.world_size, types, **options).collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(model, env=env, plan=plan, sharders=sharders, device=torch.device("cpu"))


def optimizers_of(model: DistributedModelParallel) -> CombinedOptimizer:
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    wrapper = KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=LEARNING_RATE))
    return CombinedOptimizer([model.fused_optimizer, wrapper])


def train(model: nn.Module, step: int, rank: int, optimizer: Any) -> float:
    optimizer.zero_grad()
    loss = model(batch(step, rank)).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss)


def states_of_torch_checkpoint(types: list[str], **options: bool) -> dict[str, dict[str, torch.Tensor]]:
    """States of a trained model, and of others that took it over, by the functions of ``torch.distributed.checkpoint``.

    Args:
        types: sharding types.
        options: of :class:`StateDictOptions`.
    """
    trained, fresh, other = (wrap(clicks(seed), types) for seed in (3, 4, 5))
    train(trained, 0, dist.get_rank(), optimizers_of(trained))
    asked = StateDictOptions(**options)
    got = get_model_state_dict(trained, options=asked)
    set_model_state_dict(fresh, dict(got), options=asked)
    set_model_state_dict(other, trained.state_dict(), options=asked)
    whole = {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in got.items()}
    states = {
        name: model.full_state_dict()
        for name, model in (("own", trained), ("set", fresh), ("set own", other))
    }
    return {**states, "got": whole}


def keys_left_by_states(num_states: int) -> int:
    """How many more keys the group's store has after the state was asked for so often."""
    model = wrap(clicks(), ["row_wise"])
    store = store_of(dist.group.WORLD)
    model.env.communicator.barrier()  # the others may still be clearing up after the model was made
    before = store.num_keys()
    model.env.communicator.barrier()
    for _ in range(num_states):
        model.full_state_dict()
        model.fused_optimizer.full_state_dict()
    model.env.communicator.barrier()
    return int(store.num_keys() - before)


def dense_optimizer_of_torch_checkpoint() -> list[dict[str, dict[str, torch.Tensor]]]:
    """The state of an optimizer of the dense part, and of one that took it over."""
    states = []
    for seed in (3, 4):
        model = wrap(clicks(seed), ["row_wise", "table_wise"])
        dense = torch.optim.Adam([p for _, p in in_backward_optimizer_filter(model.named_parameters())])
        if states:
            set_optimizer_state_dict(model, dense, states[0])
        else:
            train(model, 0, dist.get_rank(), dense)
        states.append(get_optimizer_state_dict(model, dense))
    return [state["state"] for state in states]


def initial_weights(types: list[str]) -> dict[str, torch.Tensor]:
    torch.manual_seed(17 + 1000 * dist.get_rank())  # rank 0's seed counts
    return wrap(Clicks("meta"), types).full_state_dict()


@or_error
def with_plugins_of_rank(names_by_rank: list[str | None]) -> None:
    """Start an environment on ranks whose plugins differ."""
    names = names_by_rank[dist.get_rank()]
    environment = {} if names is None else {"SHARDWRIGHT_PLUGINS": names}
    with use_host(PluginHost(environment=environment)):
        ShardingEnv.from_process_group()


class Tied(nn.Module):
    """Two dense layers of one weight beside a collection, on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.clicks = Clicks("meta")
        self.first, self.second = nn.Linear(3, 3, device="meta"), nn.Linear(3, 3, device="meta")
        self.second.weight = self.first.weight


def tied_weights() -> bool:
    """Whether a weight that was shared on meta is shared after materialising."""
    module = wrap(Tied(), ["table_wise"]).module
    return module.first.weight is module.second.weight


ADAM = {"optimizer": "adam", "learning_rate": LEARNING_RATE}


def trained(types: list[str], fused_params: dict[str, Any] = ADAM) -> tuple[Any, CombinedOptimizer]:
    """A model after a step, and its optimizer."""
    model = wrap(clicks(), types, fused_params)
    optimizer = optimizers_of(model)
    train(model, 0, dist.get_rank(), optimizer)
    return model, optimizer


def whole_by_torch(types: list[str]) -> list[dict[str, Any]]:
    """The whole state, as torch's function and as the model gives it."""
    model, _ = trained(types, FUSED)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return [get_model_state_dict(model, options=options), model.full_state_dict()]


def saved_by_torch(types: list[str], folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Save the sharded state dicts by DCP; give the whole ones."""
    model, _ = trained(types)
    dcp.save(
        {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}, checkpoint_id=folder
    )
    return model.full_state_dict(), model.fused_optimizer.full_state_dict()["state"]


def loaded_by_torch(types: list[str], folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load by DCP into the sharded state dicts of other ranks; give the whole ones."""
    model = wrap(clicks(7), types, ADAM)
    state = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["optimizer"])
    return model.full_state_dict(), model.fused_optimizer.full_state_dict()["state"]
