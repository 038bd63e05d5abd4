"""The lookup alone: forward and backward passes of compute kernels on this process's CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from attrs import frozen
from torch import Tensor

from shardwright.contracts.compute_kernel import KernelRequest
from shardwright.contracts.lookup import Bags, BlockSpec
from shardwright.errors import UnsupportedError
from shardwright.host import host
from shardwright.planning.layouts.layout import Block
from shardwright.planning.tables.optimizers import OptimizerSpec
from shardwright.planning.tables.spec import TableSpec

RATE, EPSILON = 0.02, 1e-8
NUM_BATCHES = 3

Step = Callable[[Tensor], None]


@frozen
class Work:
    """T tables of ``[rows, dim]``, B bags of so many ids for each."""

    tables: int
    batch: int
    rows: int
    dim: int
    ids: int

    def batches(self) -> list[Tensor]:
        """The ids of some batches, ``[T * B * ids]``, table by table."""
        generator = torch.Generator().manual_seed(0)
        size = (self.tables * self.batch * self.ids,)
        return [torch.randint(0, self.rows, size, generator=generator) for _ in range(NUM_BATCHES)]

    @property
    def lengths(self) -> Tensor:
        """``[T * B]`` int32."""
        return torch.full((self.tables * self.batch,), self.ids, dtype=torch.int32)


QUICK = Work(tables=8, batch=512, rows=50_000, dim=64, ids=10)
"""Tables of 98 MiB, which no cache holds; a step of some milliseconds."""


def lookup_step(name: str, work: Work) -> Step:
    """Forward and backward of the lookup that a registered kernel builds, as the engine calls it.

    Raises:
        UnsupportedError: the kernel cannot do it here, with its reason.
    """
    tables = [TableSpec(f"t{i}", work.rows, work.dim, [f"f{i}"]) for i in range(work.tables)]
    made = host().compute_kernels.create(name)
    optimizer = OptimizerSpec("row_wise_adagrad", learning_rate=RATE, parameters=(("eps", EPSILON),))
    request = KernelRequest(
        "cpu", tables[0].data_type, work.dim, work.dim, optimizer=optimizer, on_this_machine=True
    )
    answer = made.supports(request)
    if answer is not True:
        raise UnsupportedError(f"{name}: {answer}")
    blocks = [
        BlockSpec(table, Block(table.all_rows, table.all_columns, rank=0), request, 1) for table in tables
    ]
    lookup = made.build(blocks, device=torch.device("cpu"))
    for index in range(work.tables):
        lookup.weight(index).uniform_(-0.01, 0.01)
    counts, gradient = ((work.batch,) * work.tables,), torch.rand(work.batch * work.tables * work.dim)

    def step(ids: Tensor) -> None:
        _, saved = lookup.forward(Bags(ids, work.lengths, None, counts), training=True)
        lookup.backward(saved, gradient)

    return step


def least_ms(names: Sequence[str], work: Work, *, steps: int) -> tuple[Mapping[str, float], list[str]]:
    """The fastest step of each kernel, in turn, and why others have none.

    Args:
        names: kernels.
        work: work of a step.
        steps: number of steps of each kernel.

    Returns:
        Milliseconds by kernel; reasons.
    """
    sides, reasons = dict[str, Step](), []
    for name in names:
        try:
            sides[name] = lookup_step(name, work)
        except UnsupportedError as error:
            reasons.append(str(error))
    batches = work.batches()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(steps + 1):  # the first round compiles and touches all memory
        for name, step in sides.items():
            start = time.perf_counter()
            step(batches[number % NUM_BATCHES])
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: round(min(own[1:]), 3) for name, own in times.items()}, reasons
