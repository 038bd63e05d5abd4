"""Settings of a run of the demo, checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from shardwright.errors import InvalidInputError
from shardwright.planning.documents.limits import MOST_PROCESSES

if TYPE_CHECKING:
    from shardwright_plugins.commands.demo.examples import Source

__all__ = ["DemoSettings", "Fitted", "fit_to_data", "make_source"]

DEFAULT_BATCH_SIZE = 4096
DEFAULT_SYNTHETIC_STEPS = 300
DEFAULT_CHECKPOINT_EVERY = 50
_LEAST_STEPS = 10
NUM_HELD_OUT = 65_536
"""Number of examples that the model is evaluated on: the standard error of the AUC then is about 0.002."""
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
    """Settings of a run of the demo.

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
        checkpoint: Folder of checkpoints; none are saved without it.
        checkpoint_every: Steps from one checkpoint to the next.
        resume: Go on from the newest checkpoint in the folder, if there is one.
        restarts: How often all ranks are started again after one died; they go on from the newest checkpoint.
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
    checkpoint: Path | None = None
    checkpoint_every: int = attrs.field(
        default=DEFAULT_CHECKPOINT_EVERY, validator=_within(1, "--checkpoint-every")
    )
    resume: bool = False
    restarts: int = attrs.field(default=0, validator=_within(0, "--restarts"))

    def __attrs_post_init__(self) -> None:
        """Check what several options together say, and fill in the number of steps.

        Raises:
            InvalidInputError: If there are more ranks than examples in a batch, or nowhere to resume from.
        """
        if self.batch_size < self.ranks:
            raise InvalidInputError(
                f"--batch-size {self.batch_size} is of all ranks together: {self.ranks} ranks cannot share "
                f"it. Give at least {self.ranks}."
            )
        if self.checkpoint is None and (self.resume or self.restarts):
            raise InvalidInputError("--resume and --restarts go on from a checkpoint: give --checkpoint DIR")
        if self.steps is None and not self.data:
            object.__setattr__(self, "steps", DEFAULT_SYNTHETIC_STEPS)

    def data_position(self) -> dict[str, Any]:
        """Settings that fix, with the number of steps, which examples were trained on, on any number of ranks."""
        return {"batch_size": self.batch_size, "seed": self.seed, "data": [str(path) for path in self.data]}

    @property
    def evaluation_batch_size(self) -> int:
        """Examples of a batch that is evaluated: small ones would only take longer, and learn nothing."""
        return max(self.batch_size, DEFAULT_BATCH_SIZE)


@attrs.frozen
class Fitted:
    """Settings that go with what the files allow.

    Attributes:
        settings: With the batch size and, where it is known, the number of steps.
        notes: What is to be told of them, a line each.
    """

    settings: DemoSettings
    notes: tuple[str, ...] = ()


def fit_to_data(settings: DemoSettings, batch_size: int | None) -> Fitted:
    """Look at the files, if there are any, before anything is started.

    Args:
        settings: What was asked for.
        batch_size: What was asked for; None for one that the data allow some steps of.

    Raises:
        InvalidInputError: If the files cannot be read, have malformed lines first, or too few.
    """
    source = make_source(settings)
    if not settings.data:
        return Fitted(settings)
    from shardwright_plugins.commands.demo.criteo import CriteoSource, none_held_out, too_few_to_train

    assert isinstance(source, CriteoSource)
    survey = source.look()
    if batch_size is None:
        settings = attrs.evolve(settings, batch_size=_batch_size_for(survey.num_training, settings.ranks))
    num_steps = survey.num_steps(settings.batch_size)
    if num_steps == 0:
        raise too_few_to_train(survey.num_training, settings.batch_size, source.num_bad_lines)
    if survey.num_held_out == 0:
        raise none_held_out()
    about = "" if survey.is_exact else "about "
    notes = [
        f"data:         {survey}: {about}{num_steps:,} steps of {settings.batch_size:,}, "
        f"{min(survey.num_held_out, settings.num_held_out):,} held out"
    ]
    if batch_size is None and settings.batch_size < DEFAULT_BATCH_SIZE:
        notes.append(
            f"batch size:   {settings.batch_size:,}, as the data are few for {DEFAULT_BATCH_SIZE:,}; --batch-size "
            "chooses another"
        )
    if settings.steps is not None and settings.steps > num_steps:
        notes.append(f"steps:        {settings.steps:,} were asked for; training ends with the data")
    if survey.is_exact:
        settings = attrs.evolve(settings, steps=min(num_steps, settings.steps or num_steps))
    return Fitted(settings, tuple(notes))


def _batch_size_for(num_training: int, ranks: int) -> int:
    """The default, or the largest power of two that files with fewer lines allow some steps of."""
    most = min(DEFAULT_BATCH_SIZE, max(1, num_training // _LEAST_STEPS))
    return max(ranks, 1 << (most.bit_length() - 1))


def make_source(settings: DemoSettings) -> Source:
    """Make the source of a run's examples."""
    if settings.data:
        from shardwright_plugins.commands.demo.criteo import CriteoSource

        return CriteoSource(
            settings.data,
            settings.batch_size,
            num_held_out=settings.num_held_out,
            held_out_batch_size=settings.evaluation_batch_size,
            skip_bad_lines=settings.skip_bad_lines,
        )
    from shardwright_plugins.commands.demo.synthetic import SyntheticSource

    return SyntheticSource(
        settings.seed, settings.batch_size, settings.num_held_out, settings.evaluation_batch_size
    )
