"""Steps and commands on one device: memory as planned, no idle gaps but the one wait, no wait on the main stream."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.devices.timelines import device_spans, gaps
from tests.programs import printed_by
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwright as sw
from shardwright.planning.planner import TablePlanner

ROWS, DIM, TABLES, BATCH, IDS = 2_000_000, 64, 4, 2048, 10
LONGEST_GAP_US = 200.0


def configs(rows: int, dim: int, num_tables: int) -> list[sw.EmbeddingBagConfig]:
    return [
        sw.EmbeddingBagConfig(name=f"t{i}", num_embeddings=rows, embedding_dim=dim, feature_names=[f"f{i}"])
        for i in range(num_tables)
    ]


def batch_of(rows: int, num_tables: int, batch: int, ids: int, seed: int) -> sw.KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    return sw.KeyedJaggedTensor(
        [f"f{i}" for i in range(num_tables)],
        torch.randint(0, rows, (num_tables * batch * ids,), generator=generator),
        lengths=torch.full((num_tables * batch,), ids, dtype=torch.int32),
    )


def planned(device: str, optimizer: str, kernel: str, *, rows: int = ROWS) -> tuple[Any, Any, TablePlanner]:
    """Tables on one device: their module, plan, and the planner with its report."""
    rule = sw.ParameterConstraints(
        sharding_types=["table_wise"], compute_kernels=[kernel], pooling_factors=[float(IDS)]
    )
    topology = sw.Topology(world_size=1, compute_device=device)
    planner = sw.EmbeddingShardingPlanner(topology, BATCH, constraints={"*": rule})
    bags = sw.EmbeddingBagCollection(configs(rows, DIM, TABLES), device="meta")
    sharders = [sw.EmbeddingBagCollectionSharder(fused_params={"optimizer": optimizer})]
    return bags, planner.plan(bags, sharders), planner


def planned_bytes(planner: Any) -> int:
    """Bytes of the device's memory that the plan counts."""
    return int(planner.report.plan.used_bytes[0, 0])


@pytest.mark.parametrize(("optimizer", "states"), [("row_wise_adagrad", 1 / DIM), ("adam", 2.0)])
def test_planned_memory_has_weights_states_and_what_a_step_exchanges(optimizer: str, states: float) -> None:
    _, _, planner = planned("cuda", optimizer, "fused_triton")
    weights = 4 * ROWS * DIM * TABLES
    exchanged = BATCH * TABLES * (IDS * 8 + DIM * 4)
    least = weights * (1 + states) + exchanged / 2
    assert least <= planned_bytes(planner) <= least + 4 * exchanged


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["fused_triton", "fused_torch"])
@pytest.mark.parametrize("optimizer", ["row_wise_adagrad", "adam"])
def test_peak_memory_is_within_a_tenth_of_what_was_planned(
    optimizer: str, kernel: str, record_property: Callable[[str, object], None]
) -> None:
    gc.collect()  # models of other tests, which would be given back while this one is counted
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    bags, plan, planner = planned("cuda", optimizer, kernel)
    sharders = [sw.EmbeddingBagCollectionSharder(fused_params={"optimizer": optimizer})]
    torch.cuda.reset_peak_memory_stats()
    model = sw.DistributedModelParallel(
        bags, env=sw.ShardingEnv.local(device_type="cuda"), plan=plan, sharders=sharders
    )
    for seed in range(3):
        batch = batch_of(ROWS, TABLES, BATCH, IDS, seed).to(model.device)
        model(batch).values().sum().backward()
    torch.cuda.synchronize()
    peak, expected = torch.cuda.max_memory_allocated() - before, planned_bytes(planner)
    record_property("planned MiB", round(expected / 2**20, 1))
    record_property("peak MiB", round(peak / 2**20, 1))
    assert abs(peak - expected) <= 0.1 * expected, f"planned {expected}, peak {peak} bytes"


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operators made and somebody still has, and the most that they were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        for value in tree_leaves(made):
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                self._count(value.untyped_storage())
        return made

    def _count(self, storage: Any) -> None:
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known.add(storage)
        weakref.finalize(storage, self._forget, size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _forget(self, size: int) -> None:
        self.now -= size


@pytest.mark.parametrize("optimizer", ["row_wise_adagrad", pytest.param("adam", marks=pytest.mark.slow)])
def test_plain_torch_has_a_tenth_more_alive_than_was_planned_at_most(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above shows on a GPU, a hundredth as large, of what operators return; the host is the device."""
    monkeypatch.setattr(sys.modules[__name__], "BATCH", BATCH // 100)
    rows = ROWS // 100
    bags, plan, planner = planned("cpu", optimizer, "fused_torch", rows=rows)
    sharders = [sw.EmbeddingBagCollectionSharder(fused_params={"optimizer": optimizer})]
    with LiveBytes() as live:
        model = sw.DistributedModelParallel(
            bags, env=sw.ShardingEnv.local(device_type="cpu"), plan=plan, sharders=sharders
        )
        for seed in range(2):
            model(batch_of(rows, TABLES, BATCH, IDS, seed)).values().sum().backward()
    expected = int(planner.report.plan.used_bytes[0].sum())
    assert abs(live.peak - expected) <= 0.1 * expected, f"planned {expected}, peak {live.peak} bytes"


def steps(model: Any, batches: list[Any], gradient: torch.Tensor, count: int) -> None:
    for number in range(count):
        model(batches[number % len(batches)]).values().backward(gradient)


def model_on(
    device: str, kernel: str, *, place: str, rows: int = ROWS
) -> tuple[Any, list[Any], torch.Tensor]:
    """A sharded collection on a device, batches in `host` memory or on the `device`, and a gradient."""
    bags, plan, _ = planned(device, "row_wise_adagrad", kernel, rows=rows)
    sharders = [sw.EmbeddingBagCollectionSharder(fused_params={"optimizer": "row_wise_adagrad"})]
    env = sw.ShardingEnv.local(device_type=device)
    model = sw.DistributedModelParallel(bags, env=env, plan=plan, sharders=sharders)
    batches = [batch_of(rows, TABLES, BATCH, IDS, seed) for seed in range(4)]
    if place == "device":
        batches = [batch.to(model.device) for batch in batches]
    return model, batches, torch.rand(BATCH, TABLES * DIM).to(model.device)


@pytest.mark.parametrize("place", ["host", "device"])
def test_steps_of_these_tests_run_on_the_cpu_too(place: str) -> None:
    model, batches, gradient = model_on("cpu", "fused_torch", place=place, rows=1000)
    before = model.full_state_dict()["embedding_bags.t0.weight"].clone()
    steps(model, batches, gradient, 1)
    assert not torch.equal(before, model.full_state_dict()["embedding_bags.t0.weight"])


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["host", "device"])
def test_step_never_makes_the_host_wait_for_the_main_stream(place: str) -> None:
    """torch raises where the host waits for the current stream; the one wait is for an event beside it."""
    model, batches, gradient = model_on("cuda", "fused_triton", place=place)
    steps(model, batches, gradient, 4)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps(model, batches, gradient, 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize(("place", "num_waits"), [("host", 0), ("device", 1)])
def test_device_is_idle_in_a_step_for_its_one_wait_alone(
    place: str, num_waits: int, record_property: Callable[[str, object], None]
) -> None:
    from torch.profiler import ProfilerActivity, profile

    model, batches, gradient = model_on("cuda", "fused_triton", place=place)
    steps(model, batches, gradient, 8)
    torch.cuda.synchronize()
    count = 8
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        steps(model, batches, gradient, count)
        torch.cuda.synchronize()
    found = gaps(device_spans(trace.events()), longer_than=LONGEST_GAP_US)
    print(
        f"\nbatch on the {place}: gaps above 0.2 ms in {count} steps: {[round(b - a) for a, b in found]} us"
    )
    assert len(found) <= count * num_waits


def test_gaps_are_what_no_stream_fills() -> None:
    spans = [(0.0, 10.0), (5.0, 30.0), (12.0, 14.0), (250.0, 260.0), (260.5, 300.0), (700.0, 701.0)]
    assert gaps(spans, longer_than=200.0) == [(30.0, 250.0), (300.0, 700.0)]
    assert gaps(spans, longer_than=1000.0) == []
    assert gaps([], longer_than=1.0) == []


@pytest.mark.gpu
def test_demo_on_cuda_prints_its_throughput() -> None:
    command = "-m shardwright demo --device cuda --ranks 1 --steps 50"
    assert "examples/s on 1 rank" in printed_by(*command.split())
