"""What ranks do in the tests of what goes wrong before training; importable by their processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.distributed.dense_workers import Towers
from tests.errors import error_of

from shardwright import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbeddingShardingPlanner,
    KeyedJaggedTensor,
    ParameterConstraints,
    ShardingEnv,
    ShardingPlan,
)
from shardwright.settings import CHECKS_VARIABLE
from shardwright_plugins.comm_backends.settings import SHARED_MEMORY_VARIABLE
from shardwright_plugins.dense_part import data_parallel

VICTIM = 1
FAR_OFF_S = 300.0  # longer than a test may take: who waits for this time-out fails it


def _group(timeout_s: float) -> Any:
    return dist.new_group(timeout=timedelta(seconds=timeout_s))


def _plan(env: ShardingEnv) -> ShardingPlan:
    constraints = {"t": ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused_torch"])}
    planner = EmbeddingShardingPlanner(batch_size=2, constraints=constraints)
    sharders = [EmbeddingBagCollectionSharder(input_checks="standard")]
    return planner.collective_plan(Towers(), sharders, env.process_group)


def _variable(name: str) -> AbstractContextManager[Any]:
    return mock.patch.dict(os.environ, {name: "wrong"})


def _raising(owner: Any, name: str, error: Exception) -> AbstractContextManager[Any]:
    return mock.patch.object(owner, name, side_effect=error)


WRONG: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "connecting": lambda: _variable(SHARED_MEMORY_VARIABLE),
    "connected": lambda: _variable("LOCAL_WORLD_SIZE"),
    "planning": lambda: _raising(ShardingPlan, "from_json", MemoryError("no memory")),
    "sharding": lambda: _variable(CHECKS_VARIABLE),
    "wrapping": lambda: _raising(data_parallel, "DenseDataParallel", OSError("no dense part")),
}


def fail_alone(where: str) -> str:
    """Rank 1 alone fails while the ranks are set up; returns what each rank raised."""
    group = _group(FAR_OFF_S)
    with WRONG[where]() if dist.get_rank() == VICTIM else nullcontext():
        return error_of(lambda: _set_up(group))


def wait_after_a_failure() -> str:
    """Rank 1 fails where the others wait for it in a collective; returns what becomes of their next one."""
    group = _group(FAR_OFF_S)
    with WRONG["sharding"]() if dist.get_rank() == VICTIM else nullcontext():
        assert CHECKS_VARIABLE in error_of(lambda: _set_up(group))
    return "failed" if dist.get_rank() == VICTIM else error_of(lambda: dist.barrier(group))


def _set_up(group: Any) -> None:
    env = ShardingEnv.from_process_group(group)
    DistributedModelParallel(Towers(), env, plan=_plan(env))


def try_again() -> str:
    """Rank 1 fails before the first collective of a group, which all then use once more."""
    group = _group(FAR_OFF_S)
    with _variable(SHARED_MEMORY_VARIABLE) if dist.get_rank() == VICTIM else nullcontext():
        first = error_of(lambda: ShardingEnv.from_process_group(group))
    assert "SHARDWRIGHT_SHARED_MEMORY" in first
    return error_of(lambda: _set_up(group))


def end_with_an_error(rank: int, store: str) -> str:
    """Rank 1's process ends with an error; returns what the other raised."""
    shared = dist.FileStore(store, 2)
    dist.init_process_group(
        "gloo", store=shared, rank=rank, world_size=2, timeout=timedelta(seconds=FAR_OFF_S)
    )
    env = ShardingEnv.from_process_group()
    if env.rank == VICTIM:
        raise KeyError("no such column")
    return error_of(env.communicator.barrier)


def differ_in_the_dense_part(how: str) -> str:
    """The dense part of rank 1's model differs; returns what each rank raised."""
    env, model = ShardingEnv.from_process_group(_group(FAR_OFF_S)), Towers()
    if env.rank == VICTIM:
        last = model.dense[-1]
        if how == "dtype":
            last.double()
        elif how == "frozen":
            last.bias.requires_grad_(False)
        elif how == "missing":
            last.bias = None
        else:
            last.register_buffer("ema", torch.ones(3))
    return error_of(lambda: DistributedModelParallel(model, env, plan=_plan(env)))


@contextmanager
def served(timeout_s: float) -> Iterator[int]:
    """The world's process group, with a store that a process serves which does nothing else; yields its number."""
    address: list[Any] = [_serve() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(address)
    port, process = address[0]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        yield process
    finally:
        if rank == 0:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def _serve() -> tuple[int, int]:
    """Fork a process that serves a store; returns its port and number."""
    reader, writer = os.pipe()
    process = os.fork()
    if process:
        return int(os.read(reader, 8)), process
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    os.write(writer, str(store.port).encode())
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


def lose_the_store(before: str, fault: int) -> str:
    """What serves the store is stopped or killed before a stage; returns what each rank raised."""
    for stage in _stages():  # what is done for the first time takes its time
        if stage == "a roll call":
            break
    with served(6.0 if fault == signal.SIGSTOP else FAR_OFF_S) as process:
        stages = _stages()
        for stage in stages:
            if stage == before:
                dist.barrier()
                if dist.get_rank() == 0:
                    os.kill(process, fault)
                dist.barrier()
                return error_of(lambda: next(stages, None))
    raise AssertionError(f"there is no stage {before!r}")


def _stages() -> Iterator[str]:
    """What ranks do one after the other for which they need the store."""
    yield "connecting"
    env = ShardingEnv.from_process_group()
    yield "planning"
    plan = _plan(env)
    yield "sharding"
    model = DistributedModelParallel(Towers(), env, plan=plan)
    yield "the first step"
    features = KeyedJaggedTensor(["a"], torch.tensor([env.rank]), lengths=torch.tensor([1]))
    model(torch.ones(3, 2), features).backward()
    yield "the state"
    model.full_state_dict()
    yield "a roll call"
    if env.rank != VICTIM:
        env.communicator.barrier()


def send(told: Any, function: Callable[..., str], *args: Any) -> None:
    """Send what a function returns."""
    told.send(function(*args))
