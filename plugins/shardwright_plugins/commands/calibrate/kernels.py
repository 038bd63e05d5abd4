"""Experiments with compute kernels: lookups and updates of some blocks, on all ranks at the same time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from attrs import frozen

from shardwright.contracts.compute_kernel import NAMED_ONLY, ComputeKernel, KernelRequest
from shardwright.contracts.lookup import Bags, BlockSpec, Lookup
from shardwright.host import host
from shardwright.planning.arrays import Floats
from shardwright.planning.layouts.layout import Block
from shardwright.planning.tables.data_types import DataType
from shardwright.planning.tables.optimizers import OptimizerSpec
from shardwright.planning.tables.spec import TableSpec
from shardwright_plugins.estimators.engine.machine import BASE
from shardwright_plugins.estimators.engine.work import LookupWork
from shardwright_plugins.estimators.shard_bytes import state_bytes_of_row
from shardwright_plugins.measuring.phases import keep_memory
from shardwright_plugins.measuring.timing import quartiles_ms

OPTIMIZER = OptimizerSpec("row_wise_adagrad", learning_rate=0.02, parameters=(("eps", 1e-8),))
_EVICTED_BYTES = 48 << 20


@frozen
class KernelCase:
    """Equal blocks: tables, rows and columns of each, bags and ids of a bag."""

    tables: int
    rows: int
    columns: int
    bags: int
    ids: int


CASES = tuple(
    KernelCase(*case)
    for case in (
        (4, 200, 8, 4096, 1),
        (4, 100, 64, 2048, 20),
        (4, 1_000, 16, 2048, 4),
        (4, 2_000, 128, 2048, 4),
        (4, 5_000, 64, 2048, 20),
        (4, 20_000, 128, 4096, 3),
        (4, 20_000, 8, 1024, 12),
        (4, 50_000, 32, 1024, 30),
        (4, 100_000, 8, 2048, 8),
        (4, 100_000, 32, 4096, 8),
        (4, 100_000, 64, 4096, 1),
        (2, 200_000, 128, 2048, 8),
        (2, 400_000, 16, 4096, 16),
        (1, 800_000, 64, 4096, 16),
        (8, 50_000, 64, 1024, 2),
        (16, 10_000, 32, 1024, 5),
        (4, 200, 16, 4096, 24),
        (8, 500, 32, 2048, 10),
        (4, 1_000, 128, 4096, 16),
        (2, 3_000, 128, 4096, 24),
        (4, 5_000, 128, 2048, 10),
        (8, 20_000, 16, 4096, 1),
        (1, 60_000, 128, 4096, 28),
        (2, 130_000, 16, 4096, 16),
        (1, 160_000, 128, 4096, 22),
        # Few rows of large tables.
        (4, 300_000, 32, 2048, 2),
        (4, 500_000, 16, 4096, 4),
        (2, 800_000, 64, 4096, 4),
        (1, 1_000_000, 128, 4096, 4),
        (2, 1_000_000, 64, 2048, 1),
        (2, 1_000_000, 8, 4096, 10),
        (1, 1_000_000, 32, 4096, 20),
    )
)


@frozen
class KernelTimes:
    """Times of a kernel in each case, ms; of the cases that there was time for.

    Args:
        cases: the cases.
        lookup_ms: times of lookups.
        update_ms: times of sorting and updates.
        row_bytes: bytes of a row in each case.
        state_bytes: bytes of its optimizer state.
        updates_all: the kernel shows gradients of all rows.
    """

    cases: Sequence[KernelCase]
    lookup_ms: Floats
    update_ms: Floats
    row_bytes: Floats
    state_bytes: Floats
    updates_all: bool

    def work(self, cache_bytes: float) -> LookupWork:
        """The work of one block of each case."""
        columns = np.array(
            [(case.rows, case.columns, case.bags, case.ids) for case in self.cases], dtype=float
        ).T
        rows, widths, bags, ids = columns
        return LookupWork(
            ids=bags * ids,
            rows=rows,
            even_rows=rows,
            vectors=bags,
            columns=widths,
            gradient_columns=widths,
            row_bytes=self.row_bytes,
            state_bytes=self.state_bytes,
            updates_all=np.full(len(rows), self.updates_all),
            cache_bytes=cache_bytes,
        )

    @property
    def tables(self) -> Floats:
        """Blocks of each case."""
        return np.array([case.tables for case in self.cases], dtype=float)


def measure_kernel(
    name: str, cases: Sequence[KernelCase], precision: str = BASE, *, steps: int, seconds: float
) -> KernelTimes:
    """Measure a kernel; every rank of the process group makes this call.

    Args:
        name: its name.
        cases: work to do.
        precision: data type of rows.
        steps: steps of each case that count.
        seconds: time after which no further case begins.

    Returns:
        This rank's times, of the same cases on every rank.
    """
    keep_memory()
    kernel, deadline = host().compute_kernels.create(name), time.monotonic() + seconds
    evicted = torch.zeros(_EVICTED_BYTES // 4)
    done: list[KernelCase] = []
    found, sizes = [], []
    for case, request in zip(cases, _requests(kernel, cases, precision), strict=True):
        if done and _any(time.monotonic() > deadline):
            break
        lookup = _built(kernel, request, case)
        found.append(_times(lookup, case, evicted, steps))
        sizes.append((kernel.row_bytes(request), state_bytes_of_row(kernel, request)))
        done.append(case)
    lookup_ms, update_ms = np.array(found).T
    row_bytes, state_bytes = np.array(sizes, dtype=float).T
    return KernelTimes(done, lookup_ms, update_ms, row_bytes, state_bytes, not kernel.fuses_optimizer)


def _requests(kernel: ComputeKernel, cases: Sequence[KernelCase], precision: str) -> list[KernelRequest]:
    """Requests to a kernel, one for each case."""
    optimizer, dtype = OPTIMIZER if kernel.fuses_optimizer else None, DataType(precision)
    return [
        KernelRequest("cpu", dtype, own.columns, own.columns, optimizer=optimizer, on_this_machine=True)
        for own in cases
    ]


def refusal_of(name: str, cases: Sequence[KernelCase], precision: str = BASE) -> str | None:
    """Ask every rank's kernel, and each makes this call: a refusal of some rank, the same on all; or ``None``."""
    kernel = host().compute_kernels.create(name)
    answers = map(kernel.supports, _requests(kernel, cases, precision))
    own = next((answer for answer in answers if answer is not True), None)
    told: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    return next((answer for answer in told if answer is not None), None)


def _any(own: bool) -> bool:
    """True if it is on any rank."""
    told = torch.tensor([float(own)])
    dist.all_reduce(told)
    return bool(told > 0)


def _built(kernel: Any, request: KernelRequest, case: KernelCase) -> Lookup:
    tables = [
        TableSpec(f"t{index}", case.rows, case.columns, [f"f{index}"], request.data_type)
        for index in range(case.tables)
    ]
    blocks = [
        BlockSpec(table, Block(table.all_rows, table.all_columns, rank=0), request, 1) for table in tables
    ]
    lookup: Lookup = kernel.build(blocks, device=torch.device("cpu"))
    for index in range(case.tables):
        lookup.weight(index).detach().fill_(0.01)
    return lookup


def _times(lookup: Lookup, case: KernelCase, evicted: torch.Tensor, steps: int) -> tuple[float, float]:
    """Times of lookup and update, ms; caches are cold, as they are in a step with other tables."""
    batches, gradient = _batches(case), torch.rand(case.tables * case.bags * case.columns)
    drawn: list[Bags] = []
    kept: list[Any] = []

    def draw() -> None:
        kept.clear()
        evicted.add_(1)
        drawn[:] = [next(batches)]  # ids that have just arrived are in the cache
        dist.barrier()  # ranks share the memory's bandwidth: all work at the same time

    def look_up() -> None:
        kept.append(lookup.forward(drawn[0], training=True))

    def update() -> None:
        _, saved = kept[0]
        lookup.anticipate(saved)
        lookup.backward(saved, gradient)

    forward_ms, update_ms = quartiles_ms(look_up, update, rounds=steps, before=draw)
    return forward_ms, update_ms


def _batches(case: KernelCase) -> Iterator[Bags]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    lengths = torch.full((case.tables * case.bags,), case.ids, dtype=torch.int32)
    while True:
        ids = torch.randint(case.rows, (case.tables * case.bags * case.ids,), generator=generator)
        yield Bags(ids, lengths, None, ((case.bags,) * case.tables,))


def kernel_names() -> list[str]:
    """All kernels that are not taken by name only, the preferred first."""
    registry = host().compute_kernels
    made = [registry.create(name) for name in registry]
    kept = [kernel for kernel in made if kernel.preference != NAMED_ONLY]
    return [kernel.name for kernel in sorted(kept, key=lambda own: (-own.preference, own.name))]
