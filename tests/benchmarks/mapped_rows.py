"""Rows in a mapped file behind a cache, beside `numpy.memmap` read and written row by row, and as one gather.

Usage: python -m tests.benchmarks.mapped_rows [--mib 512] [--load-factor 0.1] [--steps 20]

A step looks up a batch of Zipf ids (exponent 1.05, scattered over the table) and updates the rows by SGD. To see what
memory does, run it with a limit on it that the table does not keep: in a cgroup, or by `systemd-run -p MemoryMax=...`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import shardwright as sw
from shardwright.contracts.lookup import Bags, BlockSpec
from shardwright.host import host

DIM, BATCH, IDS, RATE = 64, 1024, 10, 0.1
EXPONENT = 1.05
"""Exponent of Zipf's law of the ids: a few hot rows, and a long tail (taste)."""
Step = Callable[[np.ndarray[Any, Any]], None]


def zipf_batches(rows: int, count: int) -> list[Any]:
    random = np.random.default_rng(0)
    total = np.cumsum(np.arange(1, rows + 1) ** -EXPONENT)
    scattered = random.permutation(rows)
    return [scattered[np.searchsorted(total, random.random(BATCH * IDS) * total[-1])] for _ in range(count)]


def cached(rows: int, load_factor: float, algorithm: str) -> tuple[Step, Any]:
    table = sw.TableSpec(
        "t",
        rows,
        DIM,
        ("f",),
        optimizer=sw.OptimizerSpec("sgd", RATE),
        cache=sw.CacheParams(load_factor, algorithm),
    )
    request = sw.KernelRequest.of(table, DIM, device="cpu", on_this_machine=True)
    spec = BlockSpec(table, sw.Block(table.all_rows, table.all_columns, rank=0), request, 1)
    lookup: Any = host().compute_kernels.create("mapped_caching").build([spec], device=torch.device("cpu"))
    lengths, ones = torch.full((BATCH,), IDS, dtype=torch.int32), torch.ones(BATCH * DIM)

    def step(ids: Any) -> None:
        bags = Bags(torch.from_numpy(ids), lengths, None, counts=((BATCH,),))
        lookup.backward(lookup.forward(bags, training=True)[1], ones)

    return step, lookup


def memory_map(rows: int) -> Any:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the map
    os.posix_fallocate(file.fileno(), 0, rows * DIM * 4)
    return np.memmap(file, dtype=np.float32, mode="r+", shape=(rows, DIM))


def row_by_row(table: Any) -> Step:
    def step(ids: Any) -> None:
        sums = np.zeros((BATCH, DIM), np.float32)
        for place, row in enumerate(ids.tolist()):
            sums[place // IDS] += table[row]
        for row in ids.tolist():
            table[row] -= RATE

    return step


def one_gather(table: Any) -> Step:
    def step(ids: Any) -> None:
        table[ids].reshape(BATCH, IDS, DIM).sum(1)
        distinct, counts = np.unique(ids, return_counts=True)
        table[distinct] -= RATE * counts[:, None].astype(np.float32)

    return step


def steps_per_s(step: Step, batches: list[Any]) -> float:
    """Of the second half; the first fills caches."""
    half = len(batches) // 2
    for batch in batches[:half]:
        step(batch)
    start = time.perf_counter()
    for batch in batches[half:]:
        step(batch)
    return (len(batches) - half) / (time.perf_counter() - start)


def read_mib_per_s(mib: int) -> float:
    """Speed at which a file that is not in memory is read from its start to its end."""
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile() as file:
        for _ in range(mib):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        for number in range(mib):
            os.pread(file.fileno(), 1 << 20, number << 20)
        return mib / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--load-factor", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = (arguments.mib << 20) // (DIM * 4)
    batches = zipf_batches(rows, arguments.steps)
    print(f"{rows} x {DIM} float32, batch {BATCH} x {IDS} ids; disk {read_mib_per_s(256):.0f} MiB/s")
    for algorithm in ("lru", "lfu"):
        step, lookup = cached(rows, arguments.load_factor, algorithm)
        speed = steps_per_s(step, batches)
        hits = lookup.num_hits / (lookup.num_hits + lookup.num_misses)
        print(f"mapped_caching, {algorithm:3}      {speed:7.1f} steps/s, {hits:.0%} hits", flush=True)
        del step, lookup
    for name, form in (("memmap, one gather", one_gather), ("memmap, row by row", row_by_row)):
        print(f"{name:24} {steps_per_s(form(memory_map(rows)), batches):7.1f} steps/s", flush=True)


if __name__ == "__main__":
    main()
