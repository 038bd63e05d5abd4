"""Ranks that torch's launcher starts again after one was killed: the program of ``torchrun``."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from shardwright_plugins.commands.demo import rank as demo_rank
from shardwright_plugins.commands.demo.settings import DemoSettings

_PAUSE_S = 0.5


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
