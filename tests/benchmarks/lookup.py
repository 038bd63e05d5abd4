"""The lookup alone, on one process with several threads: forward and backward of our kernels beside FBGEMM's own.

    python tests/benchmarks/lookup.py [--kernels fused] [--threads 2] [--batch 2048]

Each side has 24 tables of 100k x 64 and the same bags of 10 ids, updated by row-wise Adagrad in the backward pass.
FBGEMM alone is its table-batched embedding, called with what it wants: ids and offsets, table by table. The sides
run in turn, round by round, in one process. Prints JSON: the least and the median of each side, ms, and the ratio of
its least to FBGEMM's. `steps/step.py --ranks 1` times a whole training step on one rank.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from statistics import median
from typing import Annotated

import torch
import typer
from attrs import frozen
from torch import Tensor

from shardwright import Bags, Block, BlockSpec, KernelRequest, OptimizerSpec, TableSpec, UnsupportedError
from shardwright.host import host

RATE, EPSILON = 0.02, 1e-8
NUM_BATCHES = 3
FBGEMM = "FBGEMM alone"


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


def fbgemm_alone(work: Work) -> Step:
    """Forward and backward of FBGEMM's table-batched embedding."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        EmbeddingLocation,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(work.rows, work.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * work.tables,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=RATE,
        eps=EPSILON,
        stochastic_rounding=False,
        device=torch.device("cpu"),
    )
    tbe.init_embedding_weights_uniform(-0.01, 0.01)
    offsets = torch.arange(work.tables * work.batch + 1) * work.ids
    gradient = torch.rand(work.batch, work.tables * work.dim)

    def step(ids: Tensor) -> None:
        tbe(ids, offsets).backward(gradient)

    return step


def measure(sides: dict[str, Step], work: Work, *, rounds: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds of every step, the sides in turn; Ctrl-C ends it with what there is."""
    batches = work.batches()
    times: dict[str, list[float]] = {name: [] for name in sides}
    try:
        for step in sides.values():
            for ids in batches:
                step(ids)
        for _ in range(rounds):
            for name, step in sides.items():
                for number in range(steps):
                    start = time.perf_counter()
                    step(batches[number % NUM_BATCHES])
                    times[name].append(1e3 * (time.perf_counter() - start))
    except KeyboardInterrupt:
        typer.echo("interrupted: shown is what was measured until then", err=True)
    return {name: own for name, own in times.items() if own}


def summary(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Minimum, median and the ratio of minima to FBGEMM's of each side."""
    least = min(times.get(FBGEMM, [float("nan")]))
    return {
        name: {
            "min_ms": round(min(own), 3),
            "median_ms": round(median(own), 3),
            "ratio": round(min(own) / least, 3),
        }
        for name, own in times.items()
    }


def main(
    kernels: Annotated[str | None, typer.Option(metavar="K,...", help="All that can, by default.")] = None,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    tables: Annotated[int, typer.Option(min=1)] = 24,
    batch: Annotated[int, typer.Option(min=1)] = 2048,
    rows: Annotated[int, typer.Option(min=1)] = 100_000,
    dim: Annotated[int, typer.Option(min=1)] = 64,
    ids: Annotated[int, typer.Option(min=1)] = 10,
    steps: Annotated[int, typer.Option(min=1, help="Of a side in a round.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Of each side, alternating.")] = 5,
) -> None:
    """Time the lookup's forward and backward pass of each kernel beside FBGEMM's own."""
    torch.set_num_threads(threads)
    work = Work(tables, batch, rows, dim, ids)
    registry = host().compute_kernels
    fusing = [name for name in registry.names if registry.create(name).fuses_optimizer]
    sides, problems = {FBGEMM: fbgemm_alone(work)}, []
    for name in kernels.split(",") if kernels else fusing:
        try:
            sides[name] = lookup_step(name, work)
        except UnsupportedError as error:
            problems.append(str(error))
    figures = summary(measure(sides, work, rounds=rounds, steps=steps))
    title = f"{tables} tables of {rows} x {dim}, batch {batch}, {ids} ids, {threads} threads"
    typer.echo(json.dumps({"title": title, "sides": figures, "problems": problems}))


if __name__ == "__main__":
    typer.run(main)
