"""`shardwright plan`: plans the tables of a workload file, without the model and without torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwright.cli.plans import check_writable, write_text
from shardwright.errors import InvalidInputError

if TYPE_CHECKING:
    from shardwright.planning.machines.topology import Topology

_PART = "NAME[:key=value,...]"
_INTERRUPTED = 130  # as shells say it of a process that SIGINT ended


def plan(
    workload: Annotated[Path, typer.Argument(metavar="WORKLOAD", help="The tables, a JSON file.")],
    ranks: Annotated[int, typer.Option(min=1, help="Ranks to shard over.")],
    local: Annotated[int | None, typer.Option(min=1, help="Ranks of one host; all by default.")] = None,
    sharding_group: Annotated[
        int | None,
        typer.Option(
            min=1, help="Ranks of a sharding group, of several that average replicas; all by default."
        ),
    ] = None,
    sync_every: Annotated[
        int, typer.Option(min=1, help="Steps from one averaging of sharding groups to the next.")
    ] = 1,
    inter_host_averaging: Annotated[
        bool,
        typer.Option(
            "--inter-host-averaging", help="Sharding groups are neighbouring ranks; else replicas are."
        ),
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            help="Type of the ranks' devices, or one a rank: cuda,cuda,cpu. By default cuda; with --machine cpu."
        ),
    ] = None,
    hbm_gib: Annotated[float | None, typer.Option(min=0, help="Device memory of a rank, GiB.")] = None,
    ddr_gib: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Host memory that a rank may use, GiB. With --device cpu, by default this machine's, shared by the "
            "ranks of a host.",
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples of a rank and step; the workload's own by default.")
    ] = None,
    reserve: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="The part of device memory kept free; 0.15 by default."),
    ] = None,
    machine: Annotated[
        Path | None,
        typer.Option(
            metavar="machine.json",
            help="The machine, as calibrate measured it: its bandwidths, and its estimator by default.",
        ),
    ] = None,
    estimator: Annotated[str | None, typer.Option(metavar=_PART, help="The model of time.")] = None,
    storage_estimator: Annotated[str | None, typer.Option(metavar=_PART, help="The model of memory.")] = None,
    proposer: Annotated[
        list[str] | None, typer.Option(metavar=_PART, help="A search; several run in this order.")
    ] = None,
    partitioner: Annotated[str | None, typer.Option(metavar=_PART, help="What places shards.")] = None,
    constraints: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='JSON: {"user_*": {"min_partition": 64}, ...}.'),
    ] = None,
    objective: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What is minimised: largest_rank_time, step_time, or serving, the latency of lookups alone.",
        ),
    ] = "largest_rank_time",
    seconds: Annotated[float | None, typer.Option(help="How long to search at most.")] = None,
    refinement: Annotated[
        list[str] | None,
        typer.Option(metavar=_PART, help="What is done around the search; the innermost first."),
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="plan.json", help="Write the plan document.")] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="plan.html", help="Write the report: .html with pictures, .json, .txt, ..."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the summary only.")] = False,
) -> None:
    """Plan how to shard the tables of a workload, and say how good the plan is."""
    from shardwright.planning.assumptions import CPU_DEVICE
    from shardwright.planning.documents import CONSTRAINTS
    from shardwright.planning.planner import TablePlanner
    from shardwright.planning.report.report import writer_of
    from shardwright.planning.tables.constraints import Constraints
    from shardwright.planning.tables.workload import Workload

    for path in (output, report):
        check_writable(path)
    write_report = writer_of(report.suffix[1:] or "txt") if report else None
    loaded = Workload.read(workload)
    asked = Constraints.from_data(CONSTRAINTS.read(constraints) if constraints else {})
    topology = _topology(ranks, local, device, hbm_gib, ddr_gib, machine)
    if sharding_group is None and (sync_every > 1 or inter_host_averaging):
        raise InvalidInputError(
            "--sync-every and --inter-host-averaging are of sharding groups: give --sharding-group RANKS too"
        )
    if sharding_group is not None:
        topology = topology.sharding_group(
            sharding_group, sync_every=sync_every, use_inter_host_allreduce=inter_host_averaging
        )
    planner = TablePlanner(
        topology=topology,
        batch_size=batch or loaded.batch_size,
        constraints=loaded.constrained(asked).rules,
        estimator=estimator
        or (_estimator_of(machine) if machine and CPU_DEVICE in topology.device_types else None),
        storage_estimator=storage_estimator,
        proposer=proposer or None,
        partitioner=partitioner,
        storage_reservation=reserve,
        objective=objective,
        seconds=seconds,
        refinements=refinement or (),
    )
    try:
        made = planner.plan_tables(loaded.tables)
    except KeyboardInterrupt:
        typer.echo("interrupted before there was a plan: nothing is written", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    assert planner.report is not None  # it has just planned
    typer.echo("\n".join(planner.report.summary) if quiet else str(planner.report))
    if output is not None:
        write_text(output, made.to_json())
    if report is not None and write_report is not None:
        write_text(report, write_report(planner.report, f"Sharding plan of {loaded.name}"))


def _topology(
    ranks: int,
    local: int | None,
    asked: str | None,
    hbm_gib: float | None,
    ddr_gib: float | None,
    machine: Path | None,
) -> Topology:
    from shardwright.planning.machines.host_memory import host_memory_bytes
    from shardwright.planning.machines.topology import CPU_DEVICE, Topology

    device = asked or (CPU_DEVICE if machine else "cuda")  # machines are measured for CPUs
    ddr_cap = _bytes("--ddr-gib", ddr_gib)
    here = host_memory_bytes() if device == CPU_DEVICE and ddr_cap is None else None
    make: Callable[..., Topology] = Topology if machine is None else partial(Topology.from_machine, machine)
    return make(
        ranks,
        device.split(",") if "," in device else device,
        hbm_cap=_bytes("--hbm-gib", hbm_gib),
        ddr_cap=ddr_cap if here is None else here // (local or ranks),
        local_world_size=local,
        detected=() if here is None else ("ddr_cap",),
    )


def _estimator_of(machine: Path) -> str:
    """The estimator that a machine's document names, with the document as its argument."""
    from shardwright.planning.documents import MACHINE

    return f"{MACHINE.read(machine)['estimator']}:machine={json.dumps(str(machine.resolve()))}"


def _bytes(option: str, gib: float | None) -> int | None:
    from shardwright.planning.documents.limits import MOST_MEMORY_BYTES
    from shardwright.planning.machines.topology import GIB

    most = MOST_MEMORY_BYTES // GIB
    if gib is not None and not gib <= most:
        raise InvalidInputError(f"{option} is the memory of one rank in GiB, {most} at most; got {gib}")
    return None if gib is None else int(gib * GIB)
