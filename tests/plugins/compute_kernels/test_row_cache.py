"""Kernels with a cache of rows before a file or pinned memory: what is in the cache, and that they train alike."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from tests.plugins.compute_kernels import larger_than_memory
from tests.plugins.compute_kernels.loops import CPU, OPTIMIZERS, block_spec, built, draw_batch, kernel_of
from tests.plugins.compute_kernels.test_declarations import request_for
from tests.plugins.compute_kernels.test_lookups import CLOSE, spec_of
from tests.programs import printed_by

import shardwright as sw
from shardwright_plugins.compute_kernels.row_cache.memory import kept_for
from shardwright_plugins.compute_kernels.row_cache.turns import Turns
from shardwright_plugins.profiles import cache_statistics
from shardwright_testing.kernels.kernel_checks import check_close, go_back, gradient_of, weights_of

ALGORITHMS = ["lru", "lfu"]
DISK: Any = {"memory_bytes": {"disk": 100 << 30}, "memory_bandwidths": {"disk": 1e6}}


def model_of(kernel: str) -> sw.DistributedModelParallel:
    """One table of 700 rows, its cache of 64, in this process alone."""
    return larger_than_memory.model_of(kernel, rows=700, dim=8)


def train_step(model: sw.DistributedModelParallel, seed: int) -> None:
    ids = torch.randint(0, 700, (60,), generator=torch.Generator().manual_seed(seed))
    batch = sw.KeyedJaggedTensor(["f"], ids, lengths=torch.full((20,), 3))
    (model(batch).values() ** 2).sum().backward()


def blocks_with(
    caches: Sequence[sw.CacheParams], optimizer: str = "adagrad", *, device: str = "cpu", dim: int = 8
) -> list[sw.BlockSpec]:
    """Tables of several sizes, each behind a cache of its own."""
    specs = [
        block_spec(rows, dim, slots=slots, optimizer=spec_of(optimizer), device=device)
        for (rows, slots), _ in zip(((700, 2), (300, 1)), caches, strict=True)
    ]
    return [
        attrs.evolve(spec, request=attrs.evolve(spec.request, cache=cache))
        for spec, cache in zip(specs, caches, strict=True)
    ]


def bags_of(rows: Sequence[Sequence[int]]) -> sw.Bags:
    """One bag a slot, each with the ids of a table."""
    ids = torch.tensor([row for own in rows for row in own])
    return sw.Bags(
        ids, torch.tensor([len(own) for own in rows], dtype=torch.int32), None, counts=((1,) * len(rows),)
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_cache_that_evicts_and_overflows_trains_as_loops(algorithm: str, optimizer: str) -> None:
    """A set has 32 slots; a batch here has more rows of a set than that, which are served from the file."""
    caches = [sw.CacheParams(0.001, algorithm), sw.CacheParams(0.2, algorithm)]
    lookup = check_trained("mapped_caching", blocks_with(caches, optimizer))
    assert lookup.num_misses > lookup.num_hits / 10


def check_trained(kernel: str, blocks: list[sw.BlockSpec], device: torch.device = CPU) -> Any:
    """Train as loops do, some batches prefetched; the lookup."""
    lookup: Any
    lookup, loops = built(kernel, blocks, device=device)
    batches = [draw_batch(blocks, (20, 30), is_weighted=False, seed=seed) for seed in range(7)]
    for step, batch in enumerate(batches[:6]):
        gradient = gradient_of(loops, batch, step)
        sums, saved = lookup.forward(batch.as_bags(device), training=True)
        check_close("sums", sums.reshape(-1), loops.sums(batch))
        if step % 2:  # the rows that the backward pass updates have left by then
            lookup.prefetch(batches[step + 1].as_bags(device))
        lookup.backward(saved, gradient.to(device))
        loops.update(batch, gradient, 0.1)
    torch.testing.assert_close(
        weights_of(lookup), list(loops.weights), check_dtype=False, check_device=False, **CLOSE
    )
    return lookup


def test_rows_written_while_a_backward_pass_is_to_come_are_those_that_it_updates() -> None:
    blocks = blocks_with([sw.CacheParams(0.5)] * 2, "sgd")
    lookup, loops = built("mapped_caching", blocks)
    batch = draw_batch(blocks, (4,), is_weighted=False)
    _, saved = lookup.forward(batch.as_bags(), training=True)
    for index, weight in enumerate(loops.weights):
        lookup.weight(index).fill_(2.0)
        weight.fill_(2.0)
    go_back("rows written in between", lookup, loops, batch, saved, CPU)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_memory_declared_is_the_file_and_whole_sets_of_the_cache(algorithm: str) -> None:
    request = request_for(optimizer=sw.OptimizerSpec("adam"), cache=sw.CacheParams(0.1, algorithm))
    counted = 4000 if algorithm == "lfu" else 0
    assert kernel_of("mapped_caching").memory_bytes(request, 1000) == {
        "disk": 1000 * 16 * 4 * 3,
        "device": 128 * (16 * 4 * 3 + 17) + counted,
    }


@pytest.mark.parametrize(
    ("kernel", "changes", "reason"),
    [
        (
            "mapped_caching",
            {"device": "cuda"},
            "files are mapped into the CPU's memory, not into that of 'cuda' devices",
        ),
        ("pinned_caching", {}, "memory is pinned for 'cuda' devices, not for 'cpu'"),
        ("mapped_caching", {"optimizer": None}, "no optimizer was named to run in the backward pass"),
        (
            "mapped_caching",
            {"data_type": sw.DataType.INT8},
            "torch trains BF16, FP16, FP32 tables, not INT8",
        ),
    ],
)
def test_supports_refuses_with_its_reason(kernel: str, changes: dict[str, Any], reason: str) -> None:
    assert kernel_of(kernel).supports(request_for(**changes)) == reason


def test_folder_without_room_is_refused_with_the_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("SHARDWRIGHT_MAPPED_FOLDER", str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(sw.UnsupportedError, match=r"no file of 31\.2 KiB .* No space left .* Name a folder"):
        kernel_of("mapped_caching").build(blocks_with([sw.CacheParams()] * 2), device=CPU)


def test_folder_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHARDWRIGHT_MAPPED_FOLDER", str(tmp_path / "none"))
    with pytest.raises(sw.InvalidInputError, match=r"SHARDWRIGHT_MAPPED_FOLDER is .* no folder"):
        kernel_of("mapped_caching").build(blocks_with([sw.CacheParams()] * 2), device=CPU)


class Stream:
    """An accelerator's stream, as far as turns use it."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def record_event(self) -> str:
        self.events.append(f"end on {self.name}")
        return f"end on {self.name}"

    def wait_event(self, event: str) -> None:
        self.events.append(f"{self.name} waits for {event}")


def test_streams_wait_for_the_work_of_the_turn_before(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    streams = [Stream(name, events) for name in ("main", "side", "main")]
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: streams[0])
    turns = Turns(torch.device("cuda", 0))
    with turns:  # a forward pass
        pass
    for _ in range(2):  # rows for the next batch are prefetched, then this one's are updated
        del streams[0]
        with turns:
            pass
    assert events == [
        "end on main",
        "main waits for end on main",
        "end on main",
        "side waits for end on main",
        "end on side",
        "main waits for end on side",
        "end on main",
    ]


def test_checkpoint_has_rows_that_are_in_the_cache_and_is_read_by_another_kernel(tmp_path: Path) -> None:
    model = model_of("mapped_caching")
    for seed in range(3):
        train_step(model, seed)
    sw.save_checkpoint(tmp_path / "saved", model, model.fused_optimizer)
    saved = {name: value.clone() for name, value in model.full_state_dict().items()}
    for kernel in ("mapped_caching", "fused_torch"):
        other = model_of(kernel)
        train_step(other, 9)  # rows of its own are in the cache
        sw.load_checkpoint(tmp_path / "saved", other, other.fused_optimizer)
        torch.testing.assert_close(dict(other.full_state_dict()), saved)
        for seed in range(3, 5):
            train_step(other, seed)
        if kernel == "mapped_caching":
            expected = dict(other.full_state_dict())
        else:
            torch.testing.assert_close(dict(other.full_state_dict()), expected)


def planned(**topology: Any) -> sw.ShardingPlan:
    planner = sw.EmbeddingShardingPlanner(
        sw.Topology(world_size=2, compute_device="cpu", ddr_cap=4 << 30, **topology), 64
    )
    return planner.plan_tables([sw.TableSpec("huge", 50_000_000, 64, optimizer=sw.OptimizerSpec("adagrad"))])


def test_planner_puts_a_table_larger_than_memory_on_the_disk_of_a_topology_that_has_one() -> None:
    with pytest.raises(sw.NoPlanError):
        planned()
    sharding = planned(**DISK).plan[""]["huge"]
    assert sharding.compute_kernel == "mapped_caching"
    assert sharding.layout.extras["cache"] == {"load_factor": 0.2, "algorithm": "lru"}


class Runtime:
    """What registers memory in CUDA's runtime, with the ranges that are registered."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.ranges = code, dict[int, int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.code:
            self.ranges[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.ranges[address]
        return 0


def test_pinned_memory_is_as_large_as_the_table_and_let_go_with_its_last_view(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's allocator of pinned memory would round 5 up to 8."""
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    kept = kept_for(torch.device("cuda"), 5 << 8, 64, torch.float32, initial=0.5)
    assert runtime.ranges == {kept.data_ptr(): 5 << 16}
    assert (kept == 0.5).all()
    view = kept[3:5]
    del kept
    assert len(runtime.ranges) == 1
    assert view.sum() == 64.0
    del view
    assert runtime.ranges == {}
    assert kept_for(torch.device("cuda"), 0, 64, torch.float16).shape == (0, 64)


def test_memory_that_cannot_be_pinned_is_an_error_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(code=2))
    with pytest.raises(sw.UnsupportedError, match=r"2\.0 MiB .* cannot be pinned: .* error 2\."):
        kept_for(torch.device("cuda"), 1 << 13, 64, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_pinned_rows_behind_a_cache_on_cuda_train_as_loops(algorithm: str, optimizer: str) -> None:
    caches = [sw.CacheParams(0.001, algorithm), sw.CacheParams(0.2, algorithm)]
    blocks = blocks_with(caches, optimizer, device="cuda")
    lookup = check_trained("pinned_caching", blocks, torch.device("cuda"))
    assert lookup.num_misses > lookup.num_hits / 10


@pytest.mark.slow
def test_table_of_four_times_the_memory_trains_from_a_file_and_not_in_memory() -> None:
    """In processes that may allocate 96 MiB beyond what imports take."""

    def run(kernel: str) -> Any:
        return json.loads(
            printed_by("-m", "tests.plugins.compute_kernels.larger_than_memory", kernel, 96, 60)
        )

    assert "can't allocate memory" in run("fused_torch")["refused"]
    first, last = run("mapped_caching")["losses"]
    assert last < first / 2


ROWS, BATCH, SAMPLE, WARM, MEASURED = 8_000, 400, 150, 50, 50


def zipf_batches(exponent: float, count: int) -> list[Any]:
    """Ids whose frequency is a power of their rank, ranks being scattered over the table."""
    random = np.random.default_rng(7)
    scattered = random.permutation(ROWS)
    total = np.cumsum(np.arange(1, ROWS + 1) ** -exponent)
    ranks = [np.searchsorted(total, random.random(BATCH) * total[-1]) for _ in range(count)]
    return [scattered[own] for own in ranks]


def measured_hit_rate(batches: list[Any], cache: sw.CacheParams, warm: int) -> float:
    spec = block_spec(ROWS, 4, optimizer=sw.OptimizerSpec("sgd", 0.1))
    spec = attrs.evolve(spec, request=attrs.evolve(spec.request, cache=cache))
    lookup: Any = kernel_of("mapped_caching").build([spec], device=CPU)
    before = (0, 0)
    for number, batch in enumerate(batches):
        if number == warm:
            before = (lookup.num_hits, lookup.num_misses)
        lookup.prefetch(bags_of([batch.tolist()]))
    hits, misses = lookup.num_hits - before[0], lookup.num_misses - before[1]
    return float(hits / (hits + misses))


@pytest.mark.parametrize(
    ("algorithm", "load_factor", "exponent"),
    [
        pytest.param(*case, marks=() if case[1:] == (0.2, 1.05) else pytest.mark.slow)
        for case in product(ALGORITHMS, (0.04, 0.2), (0.8, 1.05, 1.3))
    ],
)
def test_predicted_hit_rate_on_zipf_ids_is_the_measured_one_within_2_percent(
    algorithm: str, load_factor: float, exponent: float
) -> None:
    """The sample comes first; what is measured are later batches."""
    batches = zipf_batches(exponent, SAMPLE + WARM + MEASURED)
    stats = cache_statistics(batches[:SAMPLE], ROWS, algorithm=algorithm)
    cache = sw.CacheParams(load_factor, algorithm, stats)
    assert 1 - cache.miss_rate == pytest.approx(measured_hit_rate(batches, cache, SAMPLE + WARM), abs=0.02)
    assert stats.expected_lookups == pytest.approx(np.mean([len(set(own)) for own in batches]), rel=0.02)
