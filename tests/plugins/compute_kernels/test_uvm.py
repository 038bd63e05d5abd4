"""Kernels that keep tables in host memory: what they declare, and, on CUDA devices, that they train alike."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from tests.plugins.compute_kernels.loops import (
    CPU,
    OPTIMIZERS,
    block_spec,
    built,
    draw_batch,
    kernel_of,
    skip_unless_here,
)
from tests.plugins.compute_kernels.test_declarations import request_for
from tests.plugins.compute_kernels.test_lookups import spec_of
from tests.plugins.compute_kernels.test_row_cache import check_trained

from shardwright import (
    CacheParams,
    DataType,
    EmbeddingOffloadStats,
    InvalidInputError,
    KernelRequest,
    OptimizerSpec,
)
from shardwright_testing.kernels.kernel_checks import check_close, go_back, train
from shardwright_testing.kernels.memory import held_bytes

UVM = ["fused_uvm", "fused_uvm_caching"]


def on_cuda(**changes: Any) -> KernelRequest:
    return request_for(**{"device": "cuda", "on_this_machine": False, **changes})


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kernel", UVM)
def test_supports_cuda_devices_elsewhere(kernel: str, optimizer: str) -> None:
    assert kernel_of(kernel).supports(on_cuda(optimizer=OptimizerSpec(optimizer))) is True


@pytest.mark.parametrize("kernel", UVM)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"device": "cpu"},
            "FBGEMM reads the host's memory from 'cuda' devices through unified memory, 'cpu' has none",
        ),
        (
            {"device": "tpu"},
            "FBGEMM reads the host's memory from 'cuda' devices through unified memory, 'tpu' has none",
        ),
        ({"optimizer": None}, "no optimizer was named to run in the backward pass"),
        (
            {"num_columns": 10, "embedding_dim": 10},
            "FBGEMM needs columns in multiples of 4, the block has 10",
        ),
        ({"data_type": DataType.INT8}, "FBGEMM on cuda does not train INT8 tables"),
    ],
)
def test_supports_refuses_with_its_reason(kernel: str, changes: dict[str, Any], reason: str) -> None:
    assert kernel_of(kernel).supports(on_cuda(**changes)) == reason


def test_supports_refuses_a_cache_of_rows_that_fbgemm_cannot_cache() -> None:
    request = on_cuda(data_type=DataType.BF16)
    assert kernel_of("fused_uvm").supports(request) is True
    assert (
        kernel_of("fused_uvm_caching").supports(request)
        == "FBGEMM's cache holds FP16 and FP32 rows, not BF16"
    )


@pytest.mark.parametrize("kernel", UVM)
def test_supports_refuses_here_if_fbgemm_was_built_without_unified_memory(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardwright import _fbgemm

    monkeypatch.setattr(_fbgemm, "serves", lambda operator, device: False)
    monkeypatch.setattr(_fbgemm, "available", lambda: True)
    answer = kernel_of(kernel).supports(on_cuda(on_this_machine=True))
    assert answer == "FBGEMM's build here has no unified memory (the package for CUDA devices is fbgemm-gpu)"


@pytest.mark.parametrize(
    ("optimizer", "host", "device"),
    [("sgd", 64, 0), ("adagrad", 128, 0), ("row_wise_adagrad", 64, 4), ("adam", 192, 0)],
)
def test_memory_of_uvm_is_the_hosts_but_for_one_value_a_row(optimizer: str, host: int, device: int) -> None:
    request = on_cuda(optimizer=OptimizerSpec(optimizer))
    assert kernel_of("fused_uvm").memory_bytes(request, 1000) == {
        "host": 1000 * host,
        "device": 1000 * device,
    }


@pytest.mark.parametrize(
    ("cache", "slots", "bytes_of_use"),
    [
        (CacheParams(), 224, 224),  # 200 rows, in sets of 32
        (CacheParams(0.5), 512, 512),
        (CacheParams(1.0, "lfu"), 1024, 1000),
        (CacheParams(0.0001), 32, 32),
    ],
)
def test_memory_of_a_cache_is_whole_sets_of_rows_and_what_finds_them(
    cache: CacheParams, slots: int, bytes_of_use: int
) -> None:
    request = on_cuda(optimizer=OptimizerSpec("sgd"), cache=cache)
    on_device = slots * (16 * 4 + 8) + 8 * bytes_of_use + 4 * 1000
    assert kernel_of("fused_uvm_caching").memory_bytes(request, 1000) == {"host": 64_000, "device": on_device}


def test_reads_of_a_cache_are_its_misses_from_the_host() -> None:
    stats = EmbeddingOffloadStats(0.1, 1, [7, 3], 1000)
    kernel = kernel_of("fused_uvm_caching")
    assert kernel.reads(on_cuda(cache=CacheParams(0.25))) == {"device": 0.25, "host": 0.75}
    found = kernel.reads(on_cuda(cache=CacheParams(0.25, stats=stats)))
    assert found == {"device": pytest.approx(0.7), "host": pytest.approx(0.3)}
    assert kernel_of("fused_uvm").reads(on_cuda()) == {"host": 1.0}


def test_extras_bring_the_planned_cache_back() -> None:
    kernel = kernel_of("fused_uvm_caching")
    planned = on_cuda(cache=CacheParams(0.35, "lfu"))
    extras = kernel.extras(planned)
    assert extras == {"cache": {"load_factor": 0.35, "algorithm": "lfu"}}
    run = on_cuda(extras={**extras, "other": 1})
    assert kernel.memory_bytes(run, 1000) == kernel.memory_bytes(planned, 1000)
    assert kernel.group_key(run) == kernel.group_key(planned)
    with pytest.raises(InvalidInputError, match="load_factor must be"):
        kernel.group_key(on_cuda(extras={"cache": {"load_factor": 3}}))


def test_cached_lookup_over_host_tables_trains_as_loops_and_counts_its_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skip_unless_here("fused")
    """What the lookup adds to FBGEMM's tables, here without a device: when they are flushed and emptied."""
    from shardwright_plugins.compute_kernels.fbgemm import _fused_lookup, _uvm_lookup

    called: list[str] = []

    def host_tables(blocks: Any, device: Any, *, location: Any, **cache: Any) -> Any:
        assert location.name == "MANAGED_CACHING"
        assert cache["cache_load_factor"] == 0.3
        tables = _fused_lookup.table_batched_embedding(blocks, device)
        monkeypatch.setattr(tables, "flush", lambda: called.append("flush"))
        monkeypatch.setattr(tables, "reset_cache_states", lambda: called.append("empty"))
        return tables

    monkeypatch.setattr(_uvm_lookup, "table_batched_embedding", host_tables)
    blocks = [
        attrs.evolve(spec, request=attrs.evolve(spec.request, cache=CacheParams(0.3)))
        for spec in (
            block_spec(5, 8, slots=2, optimizer=spec_of("adagrad")),
            block_spec(3, 8, optimizer=spec_of("adagrad")),
        )
    ]
    lookup, loops = built("fused_uvm_caching", blocks)
    called.clear()
    for step in range(2):
        batch = draw_batch(blocks, (2, 3), is_weighted=True, seed=step)
        sums, saved = lookup.forward(batch.as_bags(), training=True)
        check_close("sums", sums.reshape(-1), loops.sums(batch))
        lookup.weight(0)
        assert called == ["flush"]  # a backward pass is to come: the cache keeps its rows
        go_back("weights", lookup, loops, batch, saved, CPU, seed=step)
        assert called == ["flush", *["flush", "empty"] * 2]
        called.clear()
    assert set(lookup.optimizer_state(0)) == {"step", "sum"}


def test_cached_lookup_looks_up_again_what_another_batch_may_have_driven_from_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skip_unless_here("fused")
    """FBGEMM updates rows where the forward pass found them, which need not be their places any more."""
    from shardwright_plugins.compute_kernels.fbgemm import _fused_lookup, _uvm_lookup

    lookups: list[int] = []

    def host_tables(blocks: Any, device: Any, *, location: Any, **cache: Any) -> Any:
        tables = _fused_lookup.table_batched_embedding(blocks, device)
        tables.register_forward_pre_hook(lambda *_: lookups.append(1))
        return tables

    monkeypatch.setattr(_uvm_lookup, "table_batched_embedding", host_tables)
    lookup, loops = built("fused_uvm_caching", [block_spec(5, 8, slots=2, optimizer=spec_of("adagrad"))])
    batches = [draw_batch(loops.blocks, (2, 3), is_weighted=True, seed=seed) for seed in range(3)]
    first, second = (lookup.forward(batch.as_bags(), training=True)[1] for batch in batches[:2])
    assert len(lookups) == 2
    go_back("the first batch", lookup, loops, batches[0], first, CPU)
    assert len(lookups) == 3
    go_back("the second batch", lookup, loops, batches[1], second, CPU)
    assert len(lookups) == 4
    train("a batch alone", lookup, loops, batches[2], CPU)
    assert len(lookups) == 5


def cuda_blocks(kernel_cache: CacheParams, optimizer: str, rows: int = 1000, dim: int = 16) -> list[Any]:
    specs = [
        block_spec(rows, dim, slots=slots, optimizer=spec_of(optimizer), device="cuda") for slots in (2, 1)
    ]
    cached = [attrs.evolve(spec, request=attrs.evolve(spec.request, cache=kernel_cache)) for spec in specs]
    here = attrs.evolve(cached[0].request, on_this_machine=True)
    answer = kernel_of("fused_uvm_caching").supports(here)
    if answer is not True:
        pytest.skip(str(answer))
    return cached


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("cache", [CacheParams(0.04), CacheParams(0.04, "lfu")], ids=str)
def test_cache_that_evicts_on_cuda_trains_as_loops(cache: CacheParams, optimizer: str) -> None:
    check_trained("fused_uvm_caching", cuda_blocks(cache, optimizer), torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", UVM)
def test_weights_written_on_cuda_are_seen_by_the_next_lookup(kernel: str) -> None:
    blocks, device = cuda_blocks(CacheParams(0.5), "sgd"), torch.device("cuda")
    lookup, _ = built(kernel, blocks, device=device)
    batch = draw_batch(blocks, (4,), is_weighted=False)
    lookup.forward(batch.as_bags(device), training=False)  # rows are cached now
    for index in range(len(blocks)):
        lookup.weight(index).fill_(1.0)
    sums, _ = lookup.forward(batch.as_bags(device), training=False)
    lengths = torch.tensor([float(len(bag)) for bag in batch.flat()]).double()
    torch.testing.assert_close(sums.reshape(-1).double().cpu().sum(), lengths.sum() * 16)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kernel", UVM)
def test_memory_declared_on_cuda_is_what_is_held(kernel: str, optimizer: str) -> None:
    blocks = cuda_blocks(CacheParams(0.25), optimizer, rows=20_000, dim=64)
    lookup, _ = built(kernel, blocks, device=torch.device("cuda"))
    declared = [kernel_of(kernel).memory_bytes(spec.request, spec.block.num_rows) for spec in blocks]
    total = sum(sum(tiers.values()) for tiers in declared)
    tables = getattr(lookup, "_tables")  # noqa: B009 - FBGEMM's module, whose buffers are what is held
    assert held_bytes(list(tables.parameters()), list(tables.buffers())) == pytest.approx(total, rel=0.03)
