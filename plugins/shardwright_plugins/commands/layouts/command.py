"""The command `layouts`, which draws sharding types."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["drawings", "layouts"]


def layouts(
    types: Annotated[
        str | None, typer.Option(metavar="T,...", help="Sharding types; all that there are, by default.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the sample topology.")] = 4,
    hosts: Annotated[int, typer.Option(min=1, help="Hosts they are on, in equal parts.")] = 2,
    rows: Annotated[int, typer.Option(min=1, help="Rows of the sample table.")] = 8,
    dim: Annotated[int, typer.Option(min=1, help="Columns of the sample table.")] = 64,
) -> None:
    """Draw how each sharding type cuts a table and where its blocks may go."""
    from shardwright.errors import InvalidInputError
    from shardwright.host.plugin_host import host
    from shardwright.planning.documents.limits import MOST_DRAWN

    for option, value in (("--ranks", ranks), ("--rows", rows), ("--dim", dim)):
        if value > MOST_DRAWN:
            raise InvalidInputError(
                f"{option} of a sample that is drawn is {MOST_DRAWN} at most, got {value}"
            )
    if ranks % hosts:
        raise InvalidInputError(f"{ranks} ranks do not divide into {hosts} equal hosts")
    names = [name.strip() for name in types.split(",")] if types else host().sharding_types.names
    drawn = [drawings(name, ranks=ranks, hosts=hosts, rows=rows, dim=dim) for name in names]
    typer.echo("\n\n".join(drawn))


def drawings(name: str, *, ranks: int = 4, hosts: int = 2, rows: int = 8, dim: int = 64) -> str:
    """The layouts that a sharding type offers for a sample table over sample ranks, as text.

    Raises:
        UnknownPluginError: no sharding type has that name.
    """
    from shardwright.host.plugin_host import host
    from shardwright.planning.machines.topology import Topology
    from shardwright.planning.tables.constraints import ParameterConstraints
    from shardwright.planning.tables.spec import TableSpec
    from shardwright_plugins.commands.layouts.drawing import draw

    kind = host().sharding_types.create(name)
    topology = Topology(world_size=ranks, compute_device="cpu", local_world_size=ranks // hosts)
    table = TableSpec("sample", num_embeddings=rows, embedding_dim=dim)
    supported = kind.supports(table, topology)
    if supported is not True:
        return f"{kind.name} ({kind.abbreviation}): {supported}"
    offered = list(kind.layouts(table, topology, ParameterConstraints(sharding_types=[kind.name])))
    lines = [
        f"{kind.name} ({kind.abbreviation}), {own.variant + ', ' if own.variant else ''}"
        f"dataflow {' and '.join(dataflow.name for dataflow in own.dataflows)}\n" + draw(own)
        for own in offered
    ]
    return "\n".join(lines) or f"{kind.name} ({kind.abbreviation}): no layout for this table"
