"""What a run of the demo is to do, checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from shardwright.errors import InvalidInputError
from shardwright.planning.documents.limits import MOST_PROCESSES

if TYPE_CHECKING:
    from shardwright.cli.demo.examples import Source

__all__ = ["DemoSettings", "make_source"]

DEFAULT_BATCH_SIZE = 4096
DEFAULT_SYNTHETIC_STEPS = 300
NUM_HELD_OUT = 65_536
"""How many examples the model is evaluated on: the standard error of the AUC then is about 0.002."""
MAX_SEED = 2**63 - 1
"""torch and NumPy both take seeds up to here."""


def _within(least: int, option: str, most: int | None = None) -> Any:
    """A validator for whole numbers that names the option of the command line."""

    def check(instance: object, attribute: attrs.Attribute[int | None], value: int | None) -> None:
        if value is not None and value < least:
            raise InvalidInputError(f"{option} must be at least {least}, got {value}.")
        if value is not None and most is not None and value > most:
            raise InvalidInputError(f"{option} must be at most {most}, got {value}.")

    return check


@attrs.frozen(kw_only=True)
class DemoSettings:
    """What a run of the demo is to do.

    Attributes:
        ranks: Number of local processes.
        data: Files in Criteo's format; none for drawn examples.
        steps: Training steps; for files at most, None for one pass over them.
        batch_size: Examples of a step, over all ranks.
        types: The sharding types that the planner may use; none for all.
        seed: Of drawn examples and initial weights.
        skip_bad_lines: Leave out malformed lines instead of ending with an error.
        device: Type of the ranks' devices.
        num_held_out: Examples to evaluate on, at most.
    """

    ranks: int = attrs.field(default=2, validator=_within(1, "--ranks", MOST_PROCESSES))
    data: tuple[Path, ...] = ()
    steps: int | None = attrs.field(default=None, validator=_within(1, "--steps"))
    batch_size: int = attrs.field(default=DEFAULT_BATCH_SIZE, validator=_within(1, "--batch-size"))
    types: tuple[str, ...] = ()
    seed: int = attrs.field(default=0, validator=_within(0, "--seed", MAX_SEED))
    skip_bad_lines: bool = False
    device: str = "cpu"
    num_held_out: int = attrs.field(default=NUM_HELD_OUT, validator=_within(1, "num_held_out"))

    def __attrs_post_init__(self) -> None:
        """Check what several options together say, and fill in the number of steps.

        Raises:
            InvalidInputError: If there are more ranks than examples in a batch.
        """
        if self.batch_size < self.ranks:
            raise InvalidInputError(
                f"--batch-size {self.batch_size} is of all ranks together: {self.ranks} ranks cannot share "
                f"it. Give at least {self.ranks}."
            )
        if self.steps is None and not self.data:
            object.__setattr__(self, "steps", DEFAULT_SYNTHETIC_STEPS)

    @property
    def evaluation_batch_size(self) -> int:
        """Examples of a batch that is evaluated: small ones would only take longer, and learn nothing."""
        return max(self.batch_size, DEFAULT_BATCH_SIZE)


def make_source(settings: DemoSettings) -> Source:
    """Where the examples of a run come from."""
    if settings.data:
        from shardwright.cli.demo.criteo import CriteoSource

        return CriteoSource(
            settings.data,
            settings.batch_size,
            num_held_out=settings.num_held_out,
            held_out_batch_size=settings.evaluation_batch_size,
            skip_bad_lines=settings.skip_bad_lines,
        )
    from shardwright.cli.demo.synthetic import SyntheticSource

    return SyntheticSource(
        settings.seed, settings.batch_size, settings.num_held_out, settings.evaluation_batch_size
    )
