"""What comes of a run of the demo."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from shardwright.errors import InvalidInputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["DemoResult", "area_under_curve", "check_writable"]


@attrs.frozen(kw_only=True)
class DemoResult:
    """What comes of a run; its fields are the keys of the JSON document.

    Attributes:
        auc: Area under the ROC curve over the held-out examples; None if all have one label.
        best_auc: That of the probabilities with which the labels were drawn; None for files.
        examples: How many were trained on.
        examples_per_second: Of all ranks together, while training: reading or drawing them included.
        collectives_per_step: Of the sharded tables; the dense rest makes its own.
        ranks: Number of processes.
        plan: The plan document.
        steps: How many were made.
        training_seconds: How long they took.
        held_out_examples: How many the AUC is over.
        bad_lines: Malformed lines that were left out.
    """

    auc: float | None
    best_auc: float | None
    examples: int
    examples_per_second: float
    collectives_per_step: int
    ranks: int
    plan: dict[str, Any]
    steps: int
    training_seconds: float
    held_out_examples: int
    bad_lines: int

    def write(self, path: Path) -> None:
        """Write the JSON document, in place of what was there."""
        path.write_text(json.dumps(attrs.asdict(self), indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        """Some lines to print."""
        reached = f"{self.auc:.4f}" if self.auc is not None else "not defined: all have one label"
        lines = [
            f"examples:     {self.examples:,} in {self.steps:,} steps, {self.training_seconds:.1f} s",
            f"speed:        {self.examples_per_second:,.0f} examples/s on {self.ranks} rank(s)",
            f"collectives:  {self.collectives_per_step} a step for the sharded tables",
            f"AUC:          {reached} over {self.held_out_examples:,} held-out examples",
        ]
        if self.auc is not None and self.best_auc is not None:
            part = self.auc / self.best_auc
            lines.append(f"best AUC:     {self.best_auc:.4f} can be reached; this is {part:.1%} of it")
        if self.bad_lines:
            lines.append(f"bad lines:    {self.bad_lines:,} were left out")
        return "\n".join(lines)


def area_under_curve(labels: NDArray[Any], scores: NDArray[Any]) -> float | None:
    """The area under the ROC curve; None if all labels are the same."""
    if labels.min() == labels.max():
        return None
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(labels, scores))


def check_writable(path: Path) -> None:
    """Check, before the work is done, that its result can be written.

    Raises:
        InvalidInputError: If the file cannot be made or written.
    """
    try:
        if path.exists():
            with path.open("a"):
                pass
        else:
            with tempfile.TemporaryFile(dir=path.parent):
                pass
    except OSError as error:
        raise InvalidInputError(f"--json {path}: cannot be written: {error.strerror or error}.") from error
