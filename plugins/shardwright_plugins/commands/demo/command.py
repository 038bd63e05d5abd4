"""The `demo` command: checks what was asked, starts the ranks, shows and writes the result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from attrs import evolve

from shardwright.errors import DistributedError, InvalidInputError, UnknownNameError, nearest
from shardwright_plugins.commands.demo.settings import (
    DEFAULT_BATCH_SIZE,
    DEFAULT_CHECKPOINT_EVERY,
    DEFAULT_SYNTHETIC_STEPS,
    DemoSettings,
    fit_to_data,
)

if TYPE_CHECKING:
    from shardwright_plugins.commands.demo.result import DemoResult

__all__ = ["demo"]


def demo(
    ranks: Annotated[int, typer.Option(help="Local processes to train on.")] = 2,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE...",
            help="Criteo's files, plain or gzip, with tabs or commas, with or without a header (label, I1, ..., "
            "I13, C1, ..., C26). One line in ten is held out; what fills no batch at the end is not trained on. "
            "Without this, examples are drawn.",
        ),
    ] = None,
    more_data: Annotated[list[Path] | None, typer.Argument(metavar="FILE", hidden=True)] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help=f"Training steps; by default {DEFAULT_SYNTHETIC_STEPS}, or one pass over the files."
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help=f"Examples of a step, over all ranks; by default {DEFAULT_BATCH_SIZE}, or fewer where the files "
            "have few lines."
        ),
    ] = None,
    types: Annotated[
        str | None,
        typer.Option(metavar="T,...", help="Sharding types that the plan may use; all by default."),
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result there.")] = None,
    seed: Annotated[int, typer.Option(help="Of drawn examples and initial weights.")] = 0,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Leave out and count malformed lines of the files.")
    ] = False,
    device: Annotated[str, typer.Option(help="Type of the ranks' devices.")] = "cpu",
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Save checkpoints there; the newest two stay.")
    ] = None,
    checkpoint_every: Annotated[
        int, typer.Option(help="Steps from one checkpoint to the next.")
    ] = DEFAULT_CHECKPOINT_EVERY,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, on any number of ranks.")
    ] = False,
    restarts: Annotated[
        int, typer.Option(help="Start all ranks again so often after one died, from the newest checkpoint.")
    ] = 0,
) -> None:
    """Train a DLRM with sharded embedding tables on local processes, and evaluate it.

    Without --data, examples are drawn from a known model: the AUC reached is shown beside the best that can
    be reached.
    """
    from shardwright_plugins.commands.demo.result import check_measurable

    check_measurable()
    settings = DemoSettings(
        ranks=ranks,
        data=_files(data, more_data),
        steps=steps,
        batch_size=DEFAULT_BATCH_SIZE if batch_size is None else batch_size,
        types=_known_types(types),
        seed=seed,
        skip_bad_lines=skip_bad_lines,
        device=_known_device(device),
        checkpoint=None if checkpoint is None else checkpoint.resolve(),
        checkpoint_every=checkpoint_every,
        resume=resume,
        restarts=restarts,
    )
    # What the ranks would find wrong with the files is found here first, once.
    fitted = fit_to_data(settings, batch_size)
    if json is not None:
        from shardwright_plugins.commands.demo.result import check_writable

        check_writable(json)
    for note in fitted.notes:
        typer.echo(note)
    _check_devices(fitted.settings)
    _check_folder(fitted.settings)
    _run(fitted.settings, json)


def _run(settings: DemoSettings, json: Path | None) -> None:
    from rich.console import Console

    try:
        result = _launched(settings)
    except KeyboardInterrupt:
        typer.echo("interrupted: all ranks are ended", err=True)
        raise typer.Exit(130) from None
    finally:
        # A rank that was ended amid a progress bar has left the terminal without one.
        Console().show_cursor()
    typer.echo(str(result))
    if json is not None:
        result.write(json)
        typer.echo(f"written:      {json}")


def _launched(settings: DemoSettings) -> DemoResult:
    """Run all ranks, again from the newest checkpoint after one failed, as often as the settings allow."""
    from shardwright_plugins.commands.demo.rank import run_rank
    from shardwright_plugins.launch import local

    for left in reversed(range(settings.restarts + 1)):
        try:
            return local.launch(run_rank, settings, ranks=settings.ranks)[0]
        except DistributedError:
            if not left:
                raise
            settings = evolve(settings, resume=True)
    raise AssertionError  # the last attempt returns or raises


def _check_folder(settings: DemoSettings) -> None:
    """Check that a training that begins anew finds no checkpoints of another.

    Raises:
        InvalidInputError: If the folder has some.
    """
    from shardwright.runtime.checkpoint.folder import has_checkpoint

    folder = settings.checkpoint
    if folder is not None and not settings.resume and has_checkpoint(folder):
        raise InvalidInputError(
            f"{folder} has checkpoints already: give --resume to go on from the newest, or another folder"
        )


def _check_devices(settings: DemoSettings) -> None:
    """Check that this machine has a device for each rank.

    Raises:
        InvalidInputError: If it has none of the kind, or too few.
    """
    if settings.device == "cpu":
        return
    import torch

    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if found and found.type == settings.device else 0
    if count < settings.ranks:
        raise InvalidInputError(
            f"--device {settings.device}: {settings.ranks} ranks need as many devices, and torch "
            f"{torch.__version__} finds {count} here. Use fewer --ranks, or --device cpu."
        )


def _files(first: Sequence[Path] | None, more: Sequence[Path] | None) -> tuple[Path, ...]:
    """All files: `--data a b`, as a shell's pattern gives them, as well as `--data a --data b`."""
    if more and not first:
        raise InvalidInputError(f"unexpected argument '{more[0]}'. Files are given as --data {more[0]}.")
    return (*(first or ()), *(more or ()))


def _known_types(types: str | None) -> tuple[str, ...]:
    """The names, by the registry's spelling.

    Raises:
        UnknownPluginError: If one is not known; has the nearest.
    """
    if types is None:
        return ()
    from shardwright.host import host

    registry = host().sharding_types
    names = [name.strip() for name in types.split(",") if name.strip()]
    if not names:
        raise InvalidInputError(
            f"--types {types!r} names no sharding type. Known: {', '.join(registry.names)}."
        )
    return tuple(dict.fromkeys(registry.canonical(name) for name in names))


def _known_device(device: str) -> str:
    """The device, if a comm backend serves it.

    Raises:
        UnknownNameError: If none does.
    """
    from shardwright.host import host

    known = {name for entry in host().comm_backends.entries.values() for name in entry.item.devices}
    if device not in known:
        raise UnknownNameError(
            f"no comm backend serves the device {device!r}. Known: {', '.join(sorted(known)) or 'none'}."
            f"{nearest(device, known)}"
        )
    return device
