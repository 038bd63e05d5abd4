"""Measured times of steps as a document: medians of each rank, its phases and its kernel groups."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from shardwright.errors import InvalidInputError
from shardwright.planning.documents import DocumentKind
from shardwright.planning.plan.plan import ShardingPlan

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
_DOCUMENT = DocumentKind("document of measured times", schema="times.schema.json")


@frozen
class GroupTimes:
    """Times of the blocks that one kernel looks up together on a rank.

    Args:
        tables: paths of their tables.
        kernel: the compute kernel.
        phases_ms: milliseconds of its lookups and updates.
        update: time of the tables' updates, ``"in_backward"`` or ``"in_step"``.
    """

    tables: Sequence[str]
    kernel: str
    phases_ms: Mapping[str, float]
    update: str = "in_backward"


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
        placement: digest of where the plan has which shards, as of :func:`placement_of`.
        predicted: the plan's prediction, as :class:`~shardwright_plugins.following.predicted.Predicted` has it;
            ``None`` where the plan does not say what it was made from.
    """

    num_steps: int
    ranks: Sequence[RankTimes]
    placement: str = ""
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
        _DOCUMENT.check(data)
        try:
            ranks = [
                RankTimes(
                    _ms(rank["step_ms"]),
                    {name: _ms(rank["phases_ms"][name]) for name in PHASES},
                    tuple(
                        GroupTimes(
                            tuple(map(_text, own["tables"])),
                            _text(own["kernel"]),
                            {name: _ms(own["phases_ms"][name]) for name in KERNEL_PHASES},
                            _text(own["update"]),
                        )
                        for own in rank["groups"]
                    ),
                )
                for rank in data["ranks"]
            ]
            if not ranks:
                raise ValueError("no rank")
            return cls(int(_ms(data["num_steps"])), ranks, _text(data["placement"]), data.get("predicted"))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise InvalidInputError(
                f"the document of measured times is not as StepTimes writes it: {type(error).__name__}: {error}"
            ) from error

    @classmethod
    def read(cls, path: str | Path) -> MeasuredTimes:
        """The times in a file.

        Raises:
            InvalidInputError: it cannot be read, or is no such document.
        """
        text = _DOCUMENT.text(path)
        try:
            return cls.from_json(text)
        except InvalidInputError as error:
            raise InvalidInputError(f"{path}: {error}") from error


def placement_of(plan: ShardingPlan) -> str:
    """A digest of a plan's shards: equal for plans that place them alike, whatever was asked of the planner."""
    modules = json.loads(plan.to_json())["modules"]
    return hashlib.sha256(json.dumps(modules, sort_keys=True).encode()).hexdigest()[:16]


def _ms(value: Any) -> float:
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{value!r} is no time")
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
