"""A training step of a sharded collection, timed: forward, backward, fused row-wise Adagrad.

Each rank is a process with one thread; every step begins at a barrier.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from attrs import asdict, evolve, frozen
from tests.benchmarks.steps.counting import CollectiveCounter

from shardwright import (
    DistributedError,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    EmbeddingShardingPlanner,
    KeyedJaggedTensor,
    ParameterConstraints,
    ShardingEnv,
    Topology,
    UnsupportedError,
)
from shardwright.host import host
from shardwright.runtime.ranks.devices import has_accelerator, make_current
from shardwright_testing import RankPool

_NUM_BATCHES = 4
_TIMEOUT_S = 600.0
_MIN_COLUMNS = 4  # of a block, where columns are cut: narrow tables too


@frozen
class StepSettings:
    """The work of one step.

    Args:
        types: sharding types, dealt to the tables in turn.
        ranks: processes, one thread each.
        batch: samples of each rank.
        tables: equal tables, one feature each.
        rows: rows of each table.
        dim: columns of each table.
        ids: ids of each bag.
        steps: timed steps.
        hosts: number of hosts that the ranks pretend to be on, in equal parts.
        kernel: compute kernel of all tables; empty: the planner's choice.
        device: type of the ranks' devices, one a rank.
    """

    types: tuple[str, ...]
    ranks: int
    batch: int
    tables: int
    rows: int
    dim: int
    ids: int
    steps: int
    hosts: int = 1
    kernel: str = ""
    device: str = "cpu"

    def of_types(self, types: str) -> StepSettings:
        """Replace the sharding types, as ``--types`` has them."""
        return evolve(self, types=tuple(name.strip() for name in types.split(",")))

    def options(self) -> list[str]:
        """Return command-line options; those that other programs may not know only if they were asked for."""
        values = {**asdict(self), "types": ",".join(self.types)}
        unknown = ["hosts"] * (self.hosts == 1) + ["kernel"] * (not self.kernel)
        unknown += ["device"] * (self.device == "cpu")
        for name in unknown:
            del values[name]
        return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def time_step(settings: StepSettings) -> dict[str, Any]:
    """Time the step on this rank, inside a process group.

    Returns:
        ``{"median_ms", "min_ms", "collectives"}`` of this rank; every step begins at a barrier.
    """
    model = bench_model(settings)
    batches = [bench_batch(settings, number).to(model.device) for number in range(_NUM_BATCHES)]
    gradient = torch.rand(settings.batch, settings.tables * settings.dim).to(model.device)

    def step(number: int) -> None:
        model(batches[number % _NUM_BATCHES]).values().backward(gradient)
        if model.device.type != "cpu":
            torch.accelerator.synchronize()

    for number in range(_NUM_BATCHES):
        step(number)
    seconds = []
    for number in range(settings.steps):
        dist.barrier()
        start = time.perf_counter()
        step(number)
        seconds.append(time.perf_counter() - start)
    seconds.sort()
    with CollectiveCounter() as counter:
        step(0)
    return {
        "median_ms": round(1e3 * seconds[len(seconds) // 2], 3),
        "min_ms": round(1e3 * seconds[0], 3),
        "collectives": counter.count,
    }


def bench_model(settings: StepSettings) -> DistributedModelParallel:
    """The sharded collection, planned by the constraints that ``settings.types`` makes; every rank calls this."""
    names = [f"t{index}" for index in range(settings.tables)]
    configs = [
        EmbeddingBagConfig(
            name=name, num_embeddings=settings.rows, embedding_dim=settings.dim, feature_names=[f"f_{name}"]
        )
        for name in names
    ]
    constraints = {
        name: ParameterConstraints(
            sharding_types=[settings.types[index % len(settings.types)]],
            compute_kernels=[settings.kernel] if settings.kernel else None,
            min_partition=_MIN_COLUMNS,
        )
        for index, name in enumerate(names)
    }
    module = EmbeddingBagCollection(configs, device="meta")
    optimizer = {"optimizer": "row_wise_adagrad", "learning_rate": 0.02, "eps": 1e-8}
    sharders = [EmbeddingBagCollectionSharder(fused_params=optimizer)]
    device = _device_of_rank(settings)
    env = ShardingEnv.from_process_group(device_type=settings.device)
    env = evolve(env, local_world_size=settings.ranks // settings.hosts)
    topology = Topology(
        world_size=env.world_size, compute_device=env.device_type, local_world_size=env.local_world_size
    )
    planner = EmbeddingShardingPlanner(
        topology=topology, constraints=constraints, batch_size=settings.batch, storage_reservation=0.0
    )
    plan = planner.collective_plan(module, sharders, env.process_group)
    return DistributedModelParallel(module, env=env, device=device, plan=plan, sharders=sharders)


def check_devices(settings: StepSettings) -> None:
    """Check that each rank can have a device of its own.

    Raises:
        UnsupportedError: there are fewer devices of the type than ranks.
    """
    if settings.device == "cpu":
        return
    count = torch.accelerator.device_count() if has_accelerator(settings.device) else 0
    if not count:
        raise UnsupportedError(
            f"torch sees no device of type {settings.device!r} here: leave --device out to time the CPU"
        )
    if count < settings.ranks:
        raise UnsupportedError(
            f"{settings.ranks} ranks need a device each, and torch sees {count} of type {settings.device!r} here: give "
            f"--ranks {count}"
        )


def _device_of_rank(settings: StepSettings) -> torch.device:
    """This rank's own device, which becomes the current one."""
    if settings.device == "cpu":
        return torch.device("cpu")
    device = torch.device(settings.device, dist.get_rank())
    make_current(device)
    return device


def bench_batch(settings: StepSettings, number: int) -> KeyedJaggedTensor:
    """This rank's batch of that number, drawn from both."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    num_bags = settings.tables * settings.batch
    return KeyedJaggedTensor(
        keys=[f"f_t{index}" for index in range(settings.tables)],
        values=torch.randint(0, settings.rows, (num_bags * settings.ids,), generator=generator),
        lengths=torch.full((num_bags,), settings.ids, dtype=torch.int32),
    )


def measured(settings: StepSettings) -> dict[str, Any]:
    """Time the step on ranks of this machine, in processes of its own."""
    for name in settings.types:
        host().sharding_types.canonical(name)  # an unknown name costs no processes
    check_devices(settings)
    backends = host().comm_backends.entries.items()
    backend = next((name for name, entry in backends if settings.device in entry.item.devices), None)
    if backend is None:
        raise DistributedError(f"no comm backend serves the device {settings.device!r}")
    with RankPool(settings.ranks, backend=backend) as pool:
        figures: dict[str, Any] = pool.run(time_step, settings.ranks, settings, timeout_s=_TIMEOUT_S)[0]
    return figures
