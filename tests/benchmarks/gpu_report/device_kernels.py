"""Lookups and updates of compute kernels on a device, beside the bandwidth at which it copies memory.

    python -m tests.benchmarks.gpu_report.device_kernels --kernel fused_triton

Prints JSON, with a large batch and a small one.

Legend: T tables, B bags of each, N ids, U distinct rows among them, D columns.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
import typer
from attrs import asdict, frozen
from tests.benchmarks.lookup import EPSILON, RATE, Work

from shardwright import (
    Bags,
    Block,
    BlockSpec,
    KernelRequest,
    Lookup,
    OptimizerSpec,
    TableSpec,
    UnsupportedError,
)
from shardwright.host import host

LARGE = Work(tables=24, batch=8192, rows=1_000_000, dim=128, ids=20)
"""Tables of 11.4 GiB: bandwidth decides."""
SMALL = Work(tables=26, batch=64, rows=100_000, dim=64, ids=1)
"""As many tables as Criteo's data has, and few bags: launches decide."""

_FLOAT_BYTES, _ID_BYTES = 4, 8
_COPIED_BYTES = 1 << 30  # no cache holds as much


@frozen
class Figures:
    """Speed of a kernel.

    Args:
        kernel: its name.
        lookup_ms: least time of a lookup, ms.
        update_ms: least time of an update, ms.
        lookup_bandwidth: bytes that any lookup must move, over the time: bytes a second.
        update_bandwidth: likewise of an update.
    """

    kernel: str
    lookup_ms: float
    update_ms: float
    lookup_bandwidth: float
    update_bandwidth: float


def measure(
    names: Sequence[str], work: Work, device: torch.device, *, steps: int
) -> tuple[list[Figures], list[str]]:
    """Figures of each kernel that runs there, and why others have none."""
    figures, reasons = [], []
    for name in names:
        try:
            figures.append(_figures(name, work, device, steps))
        except UnsupportedError as error:
            reasons.append(str(error))
    return figures, reasons


def copy_bandwidth(device: torch.device, *, num_bytes: int = _COPIED_BYTES) -> float:
    """Bytes a second that the device reads and writes in a copy within its memory."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / least_seconds(lambda: target.copy_(source), device, 5)


def least_seconds(work: Callable[[], Any], device: torch.device, rounds: int, *, calls: int = 3) -> float:
    """Least time of a call, s, over rounds of several calls that the host waits for only at the end."""
    found = []
    for _ in range(rounds + 1):  # the first round compiles
        _wait(device)
        start = time.perf_counter()
        for _ in range(calls):
            work()
        _wait(device)
        found.append((time.perf_counter() - start) / calls)
    return min(found[1:])


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _figures(name: str, work: Work, device: torch.device, steps: int) -> Figures:
    lookup, bags = _built(name, work, device), _bags(work, device)
    gradient = torch.rand(work.tables * work.batch * work.dim, device=device)
    looked_up = least_seconds(lambda: lookup.forward(bags, training=False), device, steps)

    def update() -> None:
        lookup.backward(lookup.prepare(bags), gradient)

    updated = least_seconds(update, device, steps)
    results, num_ids = gradient.numel() * _FLOAT_BYTES, bags.ids.numel()
    row = work.dim * _FLOAT_BYTES
    # A lookup reads ids and rows and writes results; an update reads ids and gradients, and reads and writes each
    # distinct row and its sum of squares once.
    distinct = sum(len(ids.unique()) for ids in bags.ids.view(work.tables, -1))
    lookup_bytes = num_ids * (_ID_BYTES + row) + results
    update_bytes = num_ids * _ID_BYTES + results + 2 * distinct * (row + _FLOAT_BYTES)
    return Figures(name, 1e3 * looked_up, 1e3 * updated, lookup_bytes / looked_up, update_bytes / updated)


def _built(name: str, work: Work, device: torch.device) -> Lookup:
    """Lookup of equal tables under row-wise Adagrad.

    Raises:
        UnsupportedError: the kernel cannot do it here, with its reason.
    """
    kernel = host().compute_kernels.create(name)
    optimizer = OptimizerSpec("row_wise_adagrad", learning_rate=RATE, parameters=(("eps", EPSILON),))
    tables = [TableSpec(f"t{i}", work.rows, work.dim, [f"f{i}"]) for i in range(work.tables)]
    request = KernelRequest(
        device.type, tables[0].data_type, work.dim, work.dim, optimizer=optimizer, on_this_machine=True
    )
    answer = kernel.supports(request)
    if answer is not True:
        raise UnsupportedError(f"{name}: {answer}")
    blocks = [
        BlockSpec(table, Block(table.all_rows, table.all_columns, rank=0), request, 1) for table in tables
    ]
    return kernel.build(blocks, device=device)


def _bags(work: Work, device: torch.device) -> Bags:
    counts = ((work.batch,) * work.tables,)
    return Bags(work.batches()[0].to(device), work.lengths.to(device), None, counts)


def main(
    kernel: Annotated[list[str], typer.Option(help="Compute kernels.")],
    device: Annotated[str, typer.Option()] = "cuda",
    steps: Annotated[int, typer.Option(min=1, help="Timed calls of each kernel.")] = 20,
) -> None:
    """Time lookups and updates of kernels on a device.

    Raises:
        UnsupportedError: there is no such device.
    """
    if not torch.accelerator.is_available():
        raise UnsupportedError(f"kernels are to be timed on {device!r}, and torch sees no accelerator here")
    where = torch.device(device)
    copied, cases = copy_bandwidth(where), []
    for work in (LARGE, SMALL):
        figures, reasons = measure(kernel, work, where, steps=steps)
        kernels = [asdict(own) for own in figures]
        cases.append({**asdict(work), "kernels": kernels, "left_out": reasons})
        torch.accelerator.empty_cache()
    name = torch.get_device_module(where).get_device_name(where)
    typer.echo(json.dumps({"device": name, "copy_gb_s": copied / 1e9, "cases": cases}))


if __name__ == "__main__":
    typer.run(main)
