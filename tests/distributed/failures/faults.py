"""What ranks do in the tests of faults; importable by their processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from tests.distributed.failures.strikes import VICTIM, env_of, strike, time_out, told
from tests.distributed.workers import or_error
from tests.equality import Case, Table, shard_case
from tests.errors import error_of

from shardwright import DistributedError, KeyedJaggedTensor, ShardingEnv
from shardwright.runtime.ranks.group_ranks import GroupRanks
from shardwright_plugins.comm_backends import _same_host
from shardwright_plugins.comm_backends.nccl import beside
from shardwright_plugins.comm_backends.settings import SHARED_MEMORY_VARIABLE
from shardwright_plugins.dataflows.replicated import forms as replicated

FORMS = {form.__name__: form for form in replicated.FORMS}


def case(sharding_type: str) -> Case:
    """Tables of one type, on each of two hosts of two ranks, so that in each collective something is to come."""
    tables = [
        Table(rows, 4, features, pooling, sharding_type, "fused_torch", offset=offset)
        for offset, rows, features, pooling in ((VICTIM, 9, ("a",), "SUM"), (0, 10, ("b", "a"), "MEAN"))
    ]
    return Case(tables, (3, 2, 4, 3), local_world_size=2)


@contextmanager
def carried_by(carrier: str) -> Iterator[None]:
    """Pieces travel as messages in shared memory as far as they are small, by references, or by gloo."""
    if carrier == "references":  # however small a piece is
        with mock.patch.object(_same_host, "LEAST_BYTES", 8):
            yield
    elif carrier == "gloo":
        with mock.patch.dict(os.environ, {SHARED_MEMORY_VARIABLE: "off"}):
            yield
    else:
        yield


def train_until(
    label: str, fault: str, sharding_type: str, form: str | None, carrier: str = "messages"
) -> str:
    """Train; the fault befalls rank 1 before the collective called ``label`` of the second step.

    Args:
        label: the collective.
        fault: see :func:`strike`.
        sharding_type: of all tables.
        form: the only one in which copies are synchronised.
        carrier: see :func:`carried_by`.

    Returns:
        What the rank raised, and in which step.
    """
    forms = tuple(FORMS.values()) if form is None else (FORMS[form],)
    own = case(sharding_type)
    with (  # the process may live on, and run another test
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}),
        mock.patch.object(replicated, "FORMS", forms),
        carried_by(carrier),
    ):
        train(own, ShardingEnv.from_process_group())  # what is done for the first time takes its time
        return train_with_fault(own, env_of(fault), label, fault)


def train(own: Case, env: ShardingEnv) -> None:
    """One step without faults."""
    output = shard_case(own, env, own.module())(own.batch(0, env.rank)).values()
    output.backward(torch.ones_like(output))


def train_with_fault(own: Case, env: ShardingEnv, label: str, fault: str) -> str:
    """See :func:`train_until`."""
    sharded = shard_case(own, env, own.module())
    steps = 0

    def struck(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def all_to_all(*args: Any, **kwargs: Any) -> Any:
            if steps == 1 and kwargs["label"] == label:
                strike(fault)
            return exchange(*args, **kwargs)

        return all_to_all

    for communicator in (env.communicator, env.header_channel[0]):
        for name in ("all_to_all", "exchange"):
            setattr(communicator, name, struck(getattr(communicator, name)))
    try:
        with told():
            for steps in range(3):
                output = sharded(own.batch(steps, env.rank)).values()
                output.backward(torch.ones_like(output))
    except DistributedError as error:
        return f"step {steps}: {error}"
    return "nothing was raised"


@or_error
def miss_a_collective(which: str) -> str | None:
    """Have rank 1 be stuck before a collective that is no exchange."""
    env = env_of("stall")
    communicator = env.communicator
    strike("stall")
    if env.rank == VICTIM:
        return "stuck"
    collectives: dict[str, Callable[[], Any]] = {
        "a barrier": communicator.barrier,
        "a broadcast from rank 1": lambda: communicator.broadcast(torch.zeros(3), VICTIM),
        "a gathering of objects": lambda: communicator.all_gather_objects("here"),
        "a broadcast of an object from rank 1": lambda: communicator.broadcast_object(None, VICTIM),
    }
    with told():
        collectives[which]()
    return None


@or_error
def fail_late() -> None:
    """Have a collective fail on rank 0 when all of the group's time-out has gone by."""
    env = ShardingEnv.from_process_group()
    dist.barrier()  # none is still there, where rank 0 would find it
    if env.rank == 0:
        with env.communicator.named("it", time.monotonic() - GroupRanks.of(env.process_group).timeout_s):
            raise RuntimeError("it took long")


def get_over_an_error() -> str:
    """A rank reports an error, and comes to an exchange all the same; returns whom others blame later."""
    env = env_of()
    ranks = GroupRanks.of(env.process_group)
    ranks.store.grace_s = 0.3  # the ranks have one clock
    if env.rank == VICTIM:
        ranks.hear("raised A")
        time.sleep(2 * ranks.store.grace_s)
    dist.barrier()
    ones, sent = [1] * env.world_size, torch.zeros(env.world_size)
    env.communicator.all_to_all(torch.empty_like(sent), sent, ones, ones, label="ids").wait()
    return ranks.store.after("it", time.monotonic()) if env.rank == 0 else ""


def two_collections(disorder: str) -> str:
    """Rank 1 goes back through neither of two collections in any step, or all ranks not in the first."""
    own = case("row_wise")
    train(own, ShardingEnv.from_process_group())  # what is done for the first time takes its time
    env = env_of("stall" if disorder == "no backward pass" else "kill")
    sharded = [shard_case(own, env, own.module()) for _ in range(2)]
    try:
        for step in range(2):
            outputs = [collection(own.batch(step, 0)).values() for collection in sharded]
            if disorder == "no backward pass" and env.rank == VICTIM:
                continue
            if disorder == "no backward pass in the first step" and step == 0:
                continue
            for output in outputs:
                output.sum().backward()
    except DistributedError as error:
        return f"step {step}: {error}"
    return "nothing was raised"


@or_error
def call_alone(what: str) -> None:
    """Have rank 1 alone ask for state, or be unable to make its batch, while the others train."""
    own = case("row_wise")
    train(own, ShardingEnv.from_process_group())  # what is done for the first time takes its time
    env = env_of("stall" if what == "state" else "kill")
    sharded = shard_case(own, env, own.module())
    if env.rank == VICTIM and what == "batch":
        KeyedJaggedTensor(["a"], torch.arange(3), torch.ones(2), torch.tensor([3]))
    if env.rank == VICTIM and what == "state":
        sharded.full_state_dict()
    sharded(own.batch(0, env.rank)).values()


def talk_beside(backend: str) -> tuple[str, list[int], str]:
    """What the CPUs of a group's ranks say to each other that has no gloo of its own, or has.

    Returns:
        The backend that carries it, every rank's number, and how a collective that rank 1 misses fails.
    """
    group = dist.new_group(backend=backend, timeout=time_out("kill"))
    communicator = beside(group)
    assert communicator._group is beside(group)._group  # type: ignore[attr-defined]
    ranks = communicator.all_gather_objects(dist.get_rank())
    name = dist.get_backend(communicator._group)  # type: ignore[attr-defined]
    if dist.get_rank() == VICTIM:
        GroupRanks.of(group).failure("another collective", RuntimeError("closed"), time.monotonic())
        return name, ranks, ""
    return name, ranks, error_of(communicator.barrier)
