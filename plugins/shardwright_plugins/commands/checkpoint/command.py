"""The commands about checkpoints. None needs the model, nor more than one process."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.errors import InvalidInputError
from shardwright.planning.text import bytes_text, count_text
from shardwright_plugins.commands.tables import table_of

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from shardwright_plugins.checkpoint.reading import StoredCheckpoint

checkpoint = typer.Typer(help="Show, verify and convert checkpoints.", no_args_is_help=True)

_Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="A checkpoint, or a folder of them: the newest.")
]
_Step = Annotated[int | None, typer.Option(help="Of the checkpoint in the folder; the newest by default.")]
_DcpOnly = Annotated[
    bool,
    typer.Option("--dcp-only", help="torch.distributed.checkpoint alone wrote it: no step and no checksums."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@checkpoint.command()
def show(folder: _Folder, step: _Step = None, dcp_only: _DcpOnly = False, as_json: _Json = False) -> None:
    """Print what a checkpoint holds: names, shapes, dtypes and bytes, its optimizer's, plan and step."""
    found = _contents(_opened(folder, step, dcp_only=dcp_only))
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    typer.echo(f"{found['path']}: step {found['step']}, written by {count_text(found['world_size'], 'rank')}")
    _print_table(found["entries"])
    total = sum(entry["bytes"] for entry in found["entries"])
    tensors, files = count_text(len(found["entries"]), "tensor"), count_text(found["files"], "file")
    typer.echo(f"{tensors}, {bytes_text(total)}, in {files}")
    for group in found["param_groups"]:
        others = ", ".join(f"{key}={value}" for key, value in group.items() if key != "params")
        typer.echo(f"optimizer of {len(group['params'])} parameters: {others}")
    for module, tables in (found["plan"] or {}).items():
        for name, sharding in tables.items():
            typer.echo(f"plan: {'.'.join(filter(None, (module, name)))}: {sharding}")


@checkpoint.command()
def verify(folder: _Folder, step: _Step = None, as_json: _Json = False) -> None:
    """Read every file of a checkpoint, and compare it with its checksum."""
    stored = _opened(folder, step)
    assert stored.manifest is not None  # it was not asked for without
    total = sum(file.bytes for file in stored.manifest.files.values())
    with _bar("reading", total, hidden=as_json) as (bar, task):
        stored.verify(stored.files, lambda count: bar.advance(task, count))
    if as_json:
        typer.echo(json.dumps({"path": str(stored.path), "files": len(stored.files), "bytes": total}))
        return
    typer.echo(
        f"{stored.path}: {count_text(len(stored.files), 'file')}, {bytes_text(total)}: as they were written"
    )


@checkpoint.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            help="A checkpoint, one of torch.distributed.checkpoint's (TorchRec's too), or a file of torch.save."
        ),
    ],
    target: Annotated[
        Path, typer.Argument(help="A file to be written (.pt), or a folder of checkpoints to be added to.")
    ],
    step: Annotated[
        int,
        typer.Option(
            help="Of the checkpoint that is written into a folder, and of TorchRec's optimizers of tables."
        ),
    ] = 0,
    dcp_only: _DcpOnly = False,
    as_json: _Json = False,
) -> None:
    """Convert a checkpoint to a plain state dict in one file, or make one of a file or of DCP's folder.

    What goes into one file has to be in memory; folders do not. States of TorchRec's fused optimizers come too. Its
    hyperparameters do not: load with strict=False.
    """
    from shardwright_plugins.checkpoint.folder import folder_of
    from shardwright_plugins.commands.checkpoint import converting

    into_file = target.suffix in (".pt", ".pth", ".bin")
    if source.is_file() and into_file:
        raise InvalidInputError(
            f"{source} is a file already: give a folder, in which a checkpoint is made of it"
        )
    written = target if into_file else folder_of(target, step)
    if into_file:
        told = (lambda key: None) if as_json else (lambda key: typer.echo(f"reading {key}", err=True))
        converting.to_file(_opened(source, None, dcp_only=dcp_only), target, told)
    else:
        with _bar("writing", None, hidden=as_json) as (bar, task):

            def report(done: int, total: int) -> None:
                bar.update(task, completed=done, total=total)

            if source.is_file():
                converting.from_file(source, written, report)
            else:
                converting.adopt(_opened(source, None, dcp_only=True), written, report)
    typer.echo(
        json.dumps({"path": str(written), "bytes": _bytes_in(written)}) if as_json else f"written: {written}"
    )


def _bytes_in(path: Path) -> int:
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


@contextmanager
def _bar(what: str, total: int | None, *, hidden: bool) -> Iterator[tuple[Progress, TaskID]]:
    """A bar of bytes on a terminal, and its task."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, disable=hidden, transient=True) as bar:
        yield bar, bar.add_task(what, total=total)


def _opened(folder: Path, step: int | None, *, dcp_only: bool = False) -> StoredCheckpoint:
    from shardwright_plugins.checkpoint.reading import open_checkpoint

    return open_checkpoint(folder, step, dcp_only=dcp_only)


def _contents(stored: StoredCheckpoint) -> dict[str, Any]:
    """Return what `show` prints, as JSON data."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from shardwright_plugins.checkpoint.entries import GROUPS

    tensors = {
        key: entry for key, entry in stored.entries.items() if isinstance(entry, TensorStorageMetadata)
    }
    places = stored.metadata.storage_data.values()
    manifest = stored.manifest
    return {
        "path": str(stored.path),
        "step": None if manifest is None else manifest.step,
        "world_size": None if manifest is None else manifest.world_size,
        "files": len({place.relative_path for place in places}),
        "entries": [
            {
                "name": key,
                "shape": list(entry.size),
                "dtype": str(entry.properties.dtype).removeprefix("torch."),
                "bytes": math.prod(entry.size) * entry.properties.dtype.itemsize,
                "pieces": len(entry.chunks),
            }
            for key, entry in sorted(tensors.items())
        ],
        "param_groups": _plain_groups(stored.plain(GROUPS)) if GROUPS in stored.entries else [],
        "plan": None if manifest is None or manifest.plan is None else _shardings(manifest.plan),
    }


def _plain_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Hyperparameters as JSON data: a learning rate may be a tensor."""
    return [
        {key: value.tolist() if hasattr(value, "tolist") else value for key, value in group.items()}
        for group in groups
    ]


def _shardings(plan: Any) -> dict[str, dict[str, str]]:
    """The sharding type and kernel of each table of each module of a plan document."""
    return {
        module: {
            name: f"{sharding.get('sharding_type')}, {sharding.get('compute_kernel')}"
            for name, sharding in tables.items()
        }
        for module, tables in plan.get("modules", {}).items()
    }


def _print_table(entries: list[dict[str, Any]]) -> None:
    from shardwright.cli.tables import console

    table = table_of("name", "shape", "dtype", "bytes", "pieces", right=("bytes", "pieces"))
    for entry in entries:
        shape = " x ".join(map(str, entry["shape"]))
        table.add_row(entry["name"], shape, entry["dtype"], bytes_text(entry["bytes"]), str(entry["pieces"]))
    console().print(table)
