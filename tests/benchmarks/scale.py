"""What grows with the number of ranks: one rank's work in pretended worlds of 8 to 4 096 ranks.

    python -m tests.benchmarks.scale steps [--only "26 x 64, batch 64"] [--worlds 8,64,512]
    python -m tests.benchmarks.scale sharding

The other ranks are not there: they are taken to have batches of this one's form. Times are processor time of the one
thread, minima of some repetitions, without what pretending takes; each case runs in a process of its own, 5 s to 20 s,
and the table is printed when all have ended: the five cases with row_wise take two minutes with three worlds. In a step
the local ids are the same in every world: tables or rows are dealt to more ranks, and more ranks ask for them.
"""

from __future__ import annotations

import json as json_format
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from attrs import asdict, frozen
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tests.pretended import PretendedCommunicator, pretended_env, timed

from shardwright import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    Layout,
    ParameterConstraints,
    ParameterSharding,
    TableSpec,
    Topology,
)
from shardwright.host import host

app = typer.Typer(help=__doc__, no_args_is_help=True)

WORLDS = "8,64,512,4096"
HOST = 8  # ranks
LIMIT_S = 600.0
SECONDS = 4.0  # of processor time, after which a case is not repeated
ROWS_OF_A_RANK = 10
MIB = 1 << 20
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object.")]
Worlds = Annotated[str, typer.Option(help="Numbers of ranks.")]
Only = Annotated[str, typer.Option(metavar="TEXT", help="Only cases whose name has this.")]
Limit = Annotated[float, typer.Option(help="Seconds for one case.")]


@frozen
class Case:
    """A step's work, whatever the number of ranks.

    Args:
        sharding_type: of all tables.
        tables: how many, of one feature each.
        dim: columns of each.
        batch: samples of each rank.
        ids: of each bag.
        blocks: column blocks of each table.
    """

    sharding_type: str
    tables: int
    dim: int
    batch: int
    ids: int
    blocks: int = 1

    @property
    def name(self) -> str:
        """As it stands in the table."""
        return f"{self.sharding_type}, {self.tables} x {self.dim}, batch {self.batch}, {self.ids} ids"


STEPS = [
    Case("row_wise", 26, 64, 8, 2),
    Case("row_wise", 26, 64, 64, 1),
    Case("row_wise", 26, 64, 512, 10),
    Case("row_wise", 200, 64, 512, 10),
    Case("table_wise", 512, 16, 8, 1),
    Case("column_wise", 256, 32, 8, 1, 2),
    Case("table_column_wise", 256, 32, 8, 1, 2),
    Case("table_row_wise", 64, 64, 8, 8),
    Case("grid_shard", 32, 64, 8, 8, 2),
    Case("data_parallel", 26, 64, 64, 1),
]


def collection(tables: int, dim: int, rows: int) -> EmbeddingBagCollection:
    """Tables of one feature each, without memory."""
    configs = [
        EmbeddingBagConfig(
            name=f"t{i}", num_embeddings=rows, embedding_dim=dim, feature_names=[f"f{i}"], pooling="SUM"
        )
        for i in range(tables)
    ]
    return EmbeddingBagCollection(configs, device="meta")


def sharder() -> EmbeddingBagCollectionSharder:
    """Row-wise Adagrad, as in training."""
    return EmbeddingBagCollectionSharder(
        {"optimizer": "row_wise_adagrad", "learning_rate": 0.02, "eps": 1e-8}
    )


def placed(layout: Layout, number: int, world_size: int, local: int) -> Layout:
    """A layout's blocks on ranks: those it names, hosts in turn for its host groups, else ranks in turn."""
    ranks, hosts, first = [], world_size // local, number * len(layout.blocks)
    columns = sorted({block.columns.start for block in layout.blocks})
    for place, block in enumerate(layout.blocks):
        if block.rank is not None:
            ranks.append(block.rank)
        elif block.host_group is not None:
            group = number * len(columns) + columns.index(block.columns.start)
            chosen = number if block.local_rank is None else group
            turn = number // hosts * len(layout.blocks) + place
            inside = turn if block.local_rank is None else block.local_rank
            ranks.append(chosen % hosts * local + inside % local)
        else:
            ranks.append((first + place) % world_size)
    return layout if layout.is_placed else layout.placed(ranks)


def shardings(
    specs: Sequence[TableSpec], sharding_type: str, world_size: int, local: int, blocks: int = 1
) -> dict[str, ParameterSharding]:
    """How every table is sharded."""
    kind = host().sharding_types.create(sharding_type)
    topology = Topology(world_size=world_size, compute_device="cpu", local_world_size=local)
    rules = ParameterConstraints(min_partition=specs[0].embedding_dim // blocks)
    made = {}
    for number, spec in enumerate(specs):
        (layout,) = list(kind.layouts(spec, topology, rules))[:1]
        own = placed(layout, number, world_size, local)
        made[spec.name] = ParameterSharding(sharding_type, "fused_numba", own)
    return made


def hosts_of(sharding_type: str, world_size: int) -> int:
    """Ranks of a host."""
    return world_size if sharding_type in ("row_wise", "data_parallel") else min(HOST, world_size)


def shard(case: Case, world_size: int, rows: int) -> tuple[Any, PretendedCommunicator, dict[str, float]]:
    """One rank's sharded collection; and the seconds and bytes that it took."""
    local = hosts_of(case.sharding_type, world_size)
    env, communicator = pretended_env(world_size, local_world_size=local)
    module, own = collection(case.tables, case.dim, rows), sharder()
    plan = shardings(own.tables(module), case.sharding_type, world_size, local, case.blocks)
    before = forget_peak()
    seconds, model = timed(communicator, own.shard, module, plan, env, "cpu")
    figures = {
        "seconds": round(seconds, 3),
        "peak_mib": round((peak_bytes() - before) / MIB, 1),
        "compared_bytes": communicator.gathered_bytes,
    }
    return model, communicator, figures


def measure_step(case: Case, world_size: int) -> dict[str, Any]:
    """One rank's processor time, bytes and messages of a forward and a backward pass."""
    rows = ROWS_OF_A_RANK * max(world_size, 512)
    model, communicator, _ = shard(case, world_size, rows)
    gradient = torch.rand(case.batch, case.tables * case.dim)
    batches = [draw_batch(case, rows, number) for number in range(4)]
    times: dict[str, list[float]] = {"forward": [], "backward": []}
    started = time.process_time()
    number = 0
    before = forget_peak()
    while number < 8 or (number < 40 and time.process_time() - started < SECONDS):
        communicator.forget()
        seconds, output = timed(communicator, forward, model, batches[number % len(batches)])
        times["forward"].append(seconds)
        times["backward"].append(timed(communicator, output.backward, gradient)[0])
        number += 1
    return {
        "forward_ms": round(1e3 * min(times["forward"][3:]), 2),
        "backward_ms": round(1e3 * min(times["backward"][3:]), 2),
        "kib": {label: round(size / 1024, 1) for label, size in communicator.sent_bytes.items()},
        "messages": communicator.messages,
        "peak_mib": round((peak_bytes() - before) / MIB, 1),
    }


def forward(model: Any, batch: KeyedJaggedTensor) -> torch.Tensor:
    """A forward pass, waited for."""
    values: torch.Tensor = model(batch).values()
    return values


def draw_batch(case: Case, rows: int, number: int) -> KeyedJaggedTensor:
    """This rank's batch of that number."""
    generator = torch.Generator().manual_seed(number)
    num_bags = case.tables * case.batch
    return KeyedJaggedTensor(
        keys=[f"f{index}" for index in range(case.tables)],
        values=torch.randint(0, rows, (num_bags * case.ids,), generator=generator),
        lengths=torch.full((num_bags,), case.ids, dtype=torch.int32),
    )


@app.command()
def steps(worlds: Worlds = WORLDS, only: Only = "", limit: Limit = LIMIT_S, json: Json = False) -> None:
    """Time a forward and a backward pass of one rank; count its bytes and messages."""
    cases = [case for case in STEPS if only in case.name]
    jobs = [
        (case.name, size, {"step": asdict(case), "world": size}) for case in cases for size in sizes(worlds)
    ]
    show(run_all(jobs, limit), json=json, title="one rank's step")


SHARDING = [
    Case("row_wise", 26, 64, 0, 0),
    Case("row_wise", 1000, 64, 0, 0),
    Case("table_wise", 1000, 64, 0, 0),
    Case("table_row_wise", 1000, 64, 0, 0),
]


def measure_sharding(case: Case, world_size: int) -> dict[str, Any]:
    """Processor time and memory of sharding, and the bytes with which ranks compare their plans."""
    shard(Case(case.sharding_type, 1, 4, 0, 0), 8, 8)  # imports what is imported on first use
    return shard(case, world_size, world_size)[2]


@app.command()
def sharding(
    worlds: Worlds = "8,512,4096", only: Only = "", limit: Limit = LIMIT_S, json: Json = False
) -> None:
    """Time the sharding of a collection on one rank."""
    cases = [case for case in SHARDING if only in case.name]
    jobs = [
        (f"{case.tables} tables {case.sharding_type}", size, {"sharding": asdict(case), "world": size})
        for case in cases
        for size in sizes(worlds)
    ]
    show(run_all(jobs, limit), json=json, title="sharding on one rank")


def sizes(worlds: str) -> list[int]:
    """The numbers in a list."""
    return [int(size) for size in worlds.split(",")]


Job = tuple[str, int, dict[str, Any]]


def run_all(jobs: Sequence[Job], limit_s: float) -> list[dict[str, Any]]:
    """The figures of each job, in a process of its own."""
    shown = track(jobs, "measuring", console=Console(stderr=True))
    return [{"case": name, "ranks": world, **run_job(job, limit_s)} for name, world, job in shown]


def run_job(job: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """The figures of one; why there are none, where it fails."""
    words = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.benchmarks.scale",
        "measure",
        json_format.dumps(job),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    try:
        root = Path(__file__).parents[2]
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=limit_s, env=environment, cwd=root
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"more than {limit_s:.0f} s"}
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:200] if done.stderr else "no word"}
    figures: dict[str, Any] = json_format.loads(done.stdout.splitlines()[-1])
    return figures


@app.command(hidden=True)
def measure(job: str) -> None:
    """Measure one case in this process and print JSON."""
    asked = json_format.loads(job)
    torch.set_num_threads(1)
    kinds = {"step": measure_step, "sharding": measure_sharding}
    (kind,) = kinds.keys() & asked.keys()
    typer.echo(json_format.dumps(kinds[kind](Case(**asked[kind]), asked["world"])))


def forget_peak() -> int:
    """Bytes resident now; peaks are counted from here on (Linux, ``proc(5)``: clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def peak_bytes() -> int:
    """The most bytes resident since :func:`forget_peak`."""
    return status_bytes("VmHWM")


def status_bytes(name: str) -> int:
    """A line of ``/proc/self/status``, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def show(figures: Sequence[Mapping[str, Any]], *, json: bool, title: str) -> None:
    """Print the figures as a table, or as JSON."""
    if json:
        typer.echo(json_format.dumps({"title": title, "figures": figures}))
        return
    names = list(dict.fromkeys(name for row in figures for name in row))
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for name in names:
        table.add_column(name.replace("_", " "))
    for row in figures:
        table.add_row(*(text_of(row.get(name, "")) for name in names))
    Console(width=200).print(table)


def text_of(value: Any) -> str:
    """A cell."""
    return (
        ", ".join(f"{name} {own}" for name, own in value.items()) if isinstance(value, dict) else str(value)
    )


if __name__ == "__main__":
    app()
