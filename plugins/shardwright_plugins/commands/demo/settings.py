"""Settings of a run of the demo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import frozen

from shardwright.errors import InvalidInputError


@frozen(kw_only=True)
class DemoSettings:
    """Settings of a run of the demo.

    Args:
        ranks: local processes.
        steps: training steps.
        batch_size: examples of a step, over all ranks.
        types: sharding types that the planner may use; none for all.
        seed: seed of drawn examples and initial weights.
        device: type of the ranks' devices.
        num_held_out: examples to evaluate on: with so many the standard error of the AUC is about 0.002.
        checkpoint: folder of checkpoints; none are saved without it.
        checkpoint_every: steps from one checkpoint to the next.
        resume: go on from the newest checkpoint in the folder, if there is one.

    Raises:
        InvalidInputError: there are more ranks than examples in a batch, or nowhere to resume from.
    """

    ranks: int = 2
    steps: int = 300
    batch_size: int = 4096
    types: tuple[str, ...] = ()
    seed: int = 0
    device: str = "cpu"
    num_held_out: int = 65_536
    checkpoint: Path | None = None
    checkpoint_every: int = 50
    resume: bool = False

    def __attrs_post_init__(self) -> None:
        if self.batch_size < self.ranks:
            raise InvalidInputError(
                f"--batch-size {self.batch_size} is of all ranks together: {self.ranks} ranks cannot share it. "
                f"Give at least {self.ranks}."
            )
        if self.checkpoint is None and self.resume:
            raise InvalidInputError("--resume and --restarts go on from a checkpoint: give --checkpoint DIR")

    def data_position(self) -> dict[str, Any]:
        """Settings that fix, with the number of steps, which examples were trained on, on any number of ranks."""
        return {"batch_size": self.batch_size, "seed": self.seed}
