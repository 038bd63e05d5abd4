"""Ranks that torch's launcher starts again after one was killed; importable, and the program of ``torchrun``."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from shardwright_plugins.commands.demo import rank as demo_rank
from shardwright_plugins.commands.demo.settings import DemoSettings

_LATER_S, _PAUSE_S = 3.0, 0.5


def connect_again() -> int:
    """Connect; in the first attempt rank 1 is killed then. In the second rank 0 comes when rank 1 waits for it already.

    Returns:
        The number of the attempt that all ranks ended.
    """
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    if attempt and rank == 0:
        time.sleep(_LATER_S)
    dist.init_process_group("gloo")
    dist.barrier()
    if not attempt and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    dist.destroy_process_group()
    return attempt


def settings(folder: Path | None) -> DemoSettings:
    """Settings of a training that goes on from its checkpoints on as many ranks as there are."""
    return DemoSettings(
        ranks=1,
        steps=400,
        batch_size=512,
        num_held_out=16 * 512,
        checkpoint=folder,
        checkpoint_every=20,
        resume=folder is not None,
    )


def slowly(save: Callable[..., Any]) -> Callable[..., Any]:
    def saved(*arguments: Any, **options: Any) -> Any:
        time.sleep(_PAUSE_S)
        return save(*arguments, **options)

    return saved


def main(folder: str) -> None:
    """Be a rank that trains, and that gives other hosts time to come after each checkpoint."""
    print(
        "attempt",
        os.environ["TORCHELASTIC_RESTART_COUNT"],
        "world size",
        os.environ["WORLD_SIZE"],
        flush=True,
    )
    with mock.patch.object(demo_rank, "save_checkpoint", slowly(demo_rank.save_checkpoint)):
        result = demo_rank.run_rank(settings(Path(folder)))
    if result is not None:
        Path(folder, "result.json").write_text(json.dumps({"auc": result.auc, "steps": result.steps}))


if __name__ == "__main__":
    main(sys.argv[1])
