"""Measured times of steps as a document: medians of each rank, its phases and its kernel groups."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from shardwright.errors import InvalidInputError
from shardwright.planning.documents import DocumentKind

FORMAT, VERSION = "shardwright-times", 1
KERNEL_PHASES = ("forward_compute", "backward_compute")
PHASES = (
    "input_communication",
    "forward_compute",
    "forward_communication",
    "backward_communication",
    "backward_compute",
)
"""Phases that are measured, by the names that estimators give them."""
_DOCUMENT = DocumentKind("document of measured times")


@frozen
class GroupTimes:
    """Times of the blocks that one kernel looks up together on a rank.

    Args:
        tables: paths of their tables.
        kernel: the compute kernel.
        phases_ms: milliseconds of its lookups and updates.
    """

    tables: Sequence[str]
    kernel: str
    phases_ms: Mapping[str, float]


@frozen
class RankTimes:
    """Times of a rank, medians over steps.

    Args:
        step_ms: milliseconds from one step to the next, the model's dense part and whatever the loop does among them.
        phases_ms: milliseconds of each phase of the tables' part, :data:`PHASES`; waits for other ranks are in it.
        groups: the kernel groups.
    """

    step_ms: float
    phases_ms: Mapping[str, float]
    groups: tuple[GroupTimes, ...] = ()

    @property
    def tables_ms(self) -> float:
        """The tables' part of a step, ms."""
        return sum(self.phases_ms.values())


@frozen
class MeasuredTimes:
    """Measured times of the steps of a training.

    Args:
        num_steps: number of steps.
        ranks: times of each rank.
        predicted: the plan's prediction, as :class:`~shardwright_plugins.following.predicted.Predicted` has it;
            ``None`` where the plan does not say what it was made from.
    """

    num_steps: int
    ranks: Sequence[RankTimes]
    predicted: Mapping[str, Any] | None = None

    @property
    def tables_ms(self) -> float:
        """The tables' part of a step without waits, ms: most of all ranks' lookups and updates, least of exchanges.

        The rank that comes last to an exchange waits for nobody.
        """
        return sum(
            (max if phase in KERNEL_PHASES else min)(rank.phases_ms[phase] for rank in self.ranks)
            for phase in PHASES
        )

    def to_json(self) -> str:
        """The document."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> MeasuredTimes:
        """The times in a document.

        Raises:
            InvalidInputError: it is no such document.
        """
        data = _DOCUMENT.parse(text)
        if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (FORMAT, VERSION):
            raise InvalidInputError(f"this is no document of the format {FORMAT!r}, version {VERSION}")
        try:
            ranks = [
                RankTimes(
                    float(rank["step_ms"]),
                    _times(rank["phases_ms"]),
                    tuple(
                        GroupTimes(tuple(own["tables"]), own["kernel"], _times(own["phases_ms"]))
                        for own in rank["groups"]
                    ),
                )
                for rank in data["ranks"]
            ]
            return cls(int(data["num_steps"]), ranks, data.get("predicted"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidInputError(
                f"the document of measured times is not as StepTimes writes it: {type(error).__name__}: {error}"
            ) from error

    @classmethod
    def read(cls, path: Path) -> MeasuredTimes:
        """The times in a file.

        Raises:
            InvalidInputError: it cannot be read, or is no such document.
        """
        try:
            return cls.from_json(_DOCUMENT.text(path))
        except InvalidInputError as error:
            raise InvalidInputError(f"{path}: {error}") from error


def _times(data: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in data.items()}
