"""The command `demo`: checks what was asked, starts the ranks, shows and writes the result."""

from __future__ import annotations

import importlib.util
import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from shardwright.errors import DistributedError, InvalidInputError, UnsupportedError
from shardwright.planning.documents.limits import MOST_PROCESSES
from shardwright_plugins.commands.demo.settings import DemoSettings

if TYPE_CHECKING:
    from shardwright_plugins.commands.demo.rank import DemoResult

_MAX_SEED = 2**63 - 1  # torch and NumPy both take seeds up to here


def demo(
    ranks: Annotated[int, typer.Option(min=1, max=MOST_PROCESSES, help="Local processes to train on.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 300,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples of a step, over all ranks.")] = 4096,
    types: Annotated[
        str | None,
        typer.Option(metavar="T,...", help="Sharding types that the plan may use; all by default."),
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result there.")] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=_MAX_SEED, help="Of drawn examples and initial weights.")
    ] = 0,
    device: Annotated[str, typer.Option(help="Type of the ranks' devices.")] = "cpu",
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Save checkpoints there; the newest two stay.")
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps from one checkpoint to the next.")] = 50,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, on any number of ranks.")
    ] = False,
    restarts: Annotated[
        int,
        typer.Option(
            min=0, help="Start all ranks again so often after one died, from the newest checkpoint."
        ),
    ] = 0,
) -> None:
    """Train a DLRM with sharded embedding tables on local processes, and evaluate it.

    Examples are drawn from a known model: the AUC reached is shown beside the best that can be reached.
    """
    from shardwright.cli.plans import check_writable, write_text
    from shardwright.host import host

    registry = host().sharding_types
    names = [registry.canonical(name.strip()) for name in (types or "").split(",") if name.strip()]
    settings = DemoSettings(
        ranks=ranks,
        steps=steps,
        batch_size=batch_size,
        types=tuple(dict.fromkeys(names)),
        seed=seed,
        device=device,
        checkpoint=None if checkpoint is None else checkpoint.resolve(),
        checkpoint_every=checkpoint_every,
        resume=resume or (restarts > 0 and checkpoint is None),  # which the settings refuse
    )
    check_writable(json)
    _check(settings)
    try:
        result = _launched(settings, restarts)
    except KeyboardInterrupt:
        typer.echo("interrupted: all ranks are ended", err=True)
        raise typer.Exit(130) from None
    typer.echo(str(result))
    if json is not None:
        write_text(json, json_format.dumps(attrs.asdict(result), indent=1) + "\n")


def _launched(settings: DemoSettings, restarts: int) -> DemoResult:
    """Run all ranks, again from the newest checkpoint after one failed, as often as asked."""
    from shardwright_plugins.commands.demo.rank import run_rank
    from shardwright_plugins.launch import local

    for left in reversed(range(restarts + 1)):
        try:
            return local.launch(run_rank, settings, ranks=settings.ranks)[0]
        except DistributedError:
            if not left:
                raise
            settings = attrs.evolve(settings, resume=True)
    raise AssertionError  # the last attempt returns or raises


def _check(settings: DemoSettings) -> None:
    """Check, before ranks are started, what they would find missing.

    Raises:
        UnsupportedError: torchmetrics, or a device for each rank, is missing.
        InvalidInputError: a training that begins anew would find checkpoints of another.
    """
    import torch

    from shardwright_plugins.checkpoint.folder import has_checkpoint

    if importlib.util.find_spec("torchmetrics") is None:
        raise UnsupportedError(
            "the demo measures its AUC with torchmetrics, which is not installed: pip install 'shardwright[demo]'"
        )
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if found and found.type == settings.device else 0
    if settings.device != "cpu" and count < settings.ranks:
        raise UnsupportedError(
            f"--device {settings.device}: {settings.ranks} ranks need as many devices, and torch "
            f"{torch.__version__} finds {count} here. Use fewer --ranks, or --device cpu."
        )
    folder = settings.checkpoint
    if folder is not None and not settings.resume and has_checkpoint(folder):
        raise InvalidInputError(
            f"{folder} has checkpoints already: give --resume to go on from the newest, or another folder"
        )
