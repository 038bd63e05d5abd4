"""What ranks do in the tests of calls that every rank must make; importable by their processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.distributed.failures.strikes import VICTIM, env_of, strike, told
from tests.distributed.workers import or_error
from tests.errors import error_of
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import shardwright as sw
from shardwright.runtime.ranks.group_ranks import GroupRanks
from shardwright_plugins.checkpoint.reading import StoredCheckpoint
from shardwright_plugins.checkpoint.writers import FolderWriter
from shardwright_plugins.resharding.exchange import RowExchange
from shardwright_plugins.sharding_groups import DMPCollection

SHARDERS = [sw.EmbeddingBagCollectionSharder(fused_params={"optimizer": "sgd", "learning_rate": 0.1})]


def planned(env: sw.ShardingEnv, sharding_type: str, *, table: str = "*") -> sw.ShardingPlan:
    """A plan of the model's tables."""
    constraints = {
        table: sw.ParameterConstraints(sharding_types=[sharding_type], compute_kernels=["fused_torch"])
    }
    planner = sw.EmbeddingShardingPlanner(batch_size=4, constraints=constraints)
    return planner.collective_plan(unsharded(), SHARDERS, env=env)


def unsharded() -> sw.EmbeddingBagCollection:
    """Two tables."""
    tables = [
        sw.EmbeddingBagConfig(name=name, num_embeddings=20, embedding_dim=8, feature_names=[name])
        for name in ("a", "b")
    ]
    return sw.EmbeddingBagCollection(tables, device="meta")


def model_of(env: sw.ShardingEnv) -> sw.DistributedModelParallel:
    """The tables sharded over the ranks."""
    torch.manual_seed(0)
    return sw.DistributedModelParallel(
        unsharded(), env, plan=planned(env, "row_wise"), sharders=SHARDERS, device=torch.device("cpu")
    )


def train(model: sw.DistributedModelParallel) -> float:
    """A step; the sum of its outputs."""
    batch = sw.KeyedJaggedTensor(["a", "b"], torch.arange(4), lengths=torch.ones(4, dtype=torch.int64))
    output = model(batch).values()
    output.backward(torch.ones_like(output))
    return float(output.detach().sum())


@contextmanager
def struck(owner: Any, name: str, fault: str, victim: int) -> Iterator[None]:
    """Have the fault befall the victim before the method is called."""
    before: Callable[..., Any] = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        strike(fault, victim=victim)
        return before(*args, **kwargs)

    with mock.patch.object(owner, name, method):
        yield


CALLS: dict[str, tuple[Any, str, int]] = {
    "planning": (sw.EmbeddingShardingPlanner, "_plan_for", 0),
    "planning a checkpoint": (DefaultSavePlanner, "create_local_plan", VICTIM),
    "writing a checkpoint": (FolderWriter, "write_data", VICTIM),
    "naming a checkpoint": (FolderWriter, "finish", 0),
    "reading a checkpoint": (StoredCheckpoint, "verify", VICTIM),
    "moving rows": (RowExchange, "make", VICTIM),
}
"""What a rank is doing when it is lost, and which rank: rank 0 alone plans and gives a checkpoint its name."""


@or_error
def lose_a_rank(what: str, fault: str, folder: str) -> None:
    """Lose a rank in a call."""
    owner, name, victim = CALLS[what]
    env = env_of()
    model, other = model_of(env), planned(env, "column_wise")
    sw.save_checkpoint(folder, model, step=1)
    hurried = env_of(fault)
    model = model_of(hurried)
    train(model)
    alone = name in ("_plan_for", "finish")
    if alone and dist.get_rank() != victim:
        strike(fault, victim=victim)
    with struck(owner, name, fault, victim), told():
        if what == "planning":
            planned(hurried, "row_wise")
        elif what == "reading a checkpoint":
            sw.load_checkpoint(folder, model)
        elif what == "moving rows":
            model.reshard(other)
        else:
            sw.save_checkpoint(folder, model, step=2)


@or_error
def lose_a_rank_of_a_new_group() -> None:
    """Lose a rank before it has done anything in a group that was made."""
    group = GroupRanks.of(env_of().process_group).new_group("the work")
    strike("kill")
    GroupRanks.of(group).meet("the work")


def two_groups(env: sw.ShardingEnv, *, size: int = 3, sync_every: int = 1) -> Any:
    """A model over sharding groups of all ranks."""
    return DMPCollection(
        unsharded(), sharding_group_size=size, global_pg=env.process_group, sync_every=sync_every
    )


def refuse_on_one_rank(what: str, folder: str) -> tuple[str, float]:
    """One rank alone refuses a call; returns what each rank raised, and what a step after that gives."""
    env = env_of()
    model, other = model_of(env), planned(env, "column_wise")
    train(model)
    sw.save_checkpoint(folder, model, step=1)
    whole, state = model.full_state_dict(), model.fused_optimizer.full_state_dict()
    refuses = env.rank == (0 if what.startswith("plan") else VICTIM)
    wrong = sw.ShardingPlan({"elsewhere": other.plan[""]}) if refuses else other
    calls: dict[str, Callable[[], Any]] = {
        "reshard: memory": lambda: model.reshard(other, max_extra_bytes=1 if refuses else 1 << 30),
        "reshard: memory below 1": lambda: model.reshard(other, max_extra_bytes=0 if refuses else 1 << 30),
        "reshard: plan": lambda: model.reshard(wrong),
        "save: step": lambda: sw.save_checkpoint(folder, model, step=-1 if refuses else 2),
        "save: extra": lambda: sw.save_checkpoint(folder, model, extra={"x": object()} if refuses else {}),
        "load: renames": lambda: sw.load_checkpoint(
            folder, model, renames={"nobody": "x"} if refuses else {}
        ),
        "load: parts": lambda: sw.load_checkpoint(folder, model, parts="state" if refuses else "all"),
        "plan: tables": lambda: planned(env, "row_wise", table="nobody" if refuses else "*"),
        "plan: sharders": lambda: sw.EmbeddingShardingPlanner(batch_size=4).collective_plan(
            unsharded(), 3 if refuses else SHARDERS, env=env
        ),
        "shard: plan": lambda: sw.DistributedModelParallel(unsharded(), env, plan=wrong, sharders=SHARDERS),
        "shard: update": lambda: sw.DistributedModelParallel(
            unsharded(), env, plan=other, sharders=SHARDERS, update="never" if refuses else None
        ),
        "shard: device": lambda: sw.DistributedModelParallel(
            unsharded(), env, plan=other, sharders=SHARDERS, device="cuda" if refuses else "cpu"
        ),
        "groups: size": lambda: two_groups(env, size=2 if refuses else 3),
        "groups: averaging": lambda: two_groups(env, sync_every=0 if refuses else 1),
        "optimizer: state": lambda: model.fused_optimizer.load_state_dict(
            {"state": {"nobody": {}}} if refuses else state
        ),
        "model: state": lambda: model.load_state_dict({} if refuses else whole),
        "connect: backend": lambda: sw.ShardingEnv.from_process_group(
            env.process_group, comm_backend="pigeons" if refuses else None
        ),
    }
    return error_of(calls[what]), train(model)


REFUSALS = {
    "reshard: memory": "InvalidInputError",
    "reshard: memory below 1": "InvalidInputError",
    "reshard: plan": "PlanError",
    "save: step": "InvalidInputError",
    "save: extra": "InvalidInputError",
    "load: renames": "InvalidInputError",
    "load: parts": "InvalidInputError",
    "plan: tables": "UnknownNameError",
    "plan: sharders": "InvalidInputError",
    "shard: plan": "InvalidInputError",
    "shard: update": "InvalidInputError",
    "shard: device": "InvalidInputError",
    "groups: size": "InvalidInputError",
    "groups: averaging": "InvalidInputError",
    "optimizer: state": "UnknownNameError",
    "connect: backend": "UnknownPluginError",
}
"""Calls that one rank alone refuses, and the class of its error."""
