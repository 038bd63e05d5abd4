"""Result of a run of the demo."""

from __future__ import annotations

import importlib.util
import json
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from shardwright.errors import InvalidInputError, UnsupportedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["DemoResult", "area_under_curve", "check_measurable", "check_writable"]

# An AUC tells something if chance rarely moves it by so much. With a quarter of clicks, as in Criteo's logs, and one
# line in ten held out, it takes so many lines.
_TELLING, _LINES_THAT_TELL = 0.05, 8_000


@attrs.frozen(kw_only=True)
class DemoResult:
    """Result of a run; its fields are the keys of the JSON document.

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
        held_out_clicks: How many of these are clicks.
        bad_lines: Malformed lines that were left out.
        normalized_entropy: Mean cross entropy over that of the share of clicks; None if all have one label.
        calibration: Mean prediction over the share of clicks; None if all have one label.
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
    held_out_clicks: int
    bad_lines: int
    normalized_entropy: float | None = None
    calibration: float | None = None

    @property
    def chance_deviation(self) -> float:
        """The standard deviation of the AUC of scores that know nothing; infinite if all have one label.

        That of the Mann-Whitney statistic for as many clicks and others (Hanley, McNeil 1982, "The meaning and use of
        the area under a ROC curve").
        """
        clicks, others = self.held_out_clicks, self.held_out_examples - self.held_out_clicks
        return math.sqrt((clicks + others + 1) / (12 * clicks * others)) if clicks * others else math.inf

    def write(self, path: Path) -> None:
        """Write the JSON document, in place of what was there."""
        path.write_text(json.dumps(attrs.asdict(self), indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        """Some lines to print."""
        reached = f"{self.auc:.4f}" if self.auc is not None else "not defined, all have one label,"
        lines = [
            f"examples:     {self.examples:,} in {self.steps:,} steps, {self.training_seconds:.1f} s",
            f"speed:        {self.examples_per_second:,.0f} examples/s on {self.ranks} rank(s)",
            f"collectives:  {self.collectives_per_step} a step for the sharded tables",
            f"AUC:          {reached} over {self.held_out_examples:,} held-out examples{self._caution}",
        ]
        if self.auc is not None and self.best_auc is not None:
            part = self.auc / self.best_auc
            lines.append(f"best AUC:     {self.best_auc:.4f} can be reached; this is {part:.1%} of it")
        if self.normalized_entropy is not None:
            lines.append(
                f"entropy:      {self.normalized_entropy:.4f} of that of the share of clicks (below 1 is better)"
            )
            lines.append(f"calibration:  {self.calibration:.3f} clicks predicted for each that there was")
        if self.bad_lines:
            lines.append(f"bad lines:    {self.bad_lines:,} were left out")
        return "\n".join(lines)

    @property
    def _caution(self) -> str:
        """Warn that so few examples tell nothing; empty if they are enough."""
        spread = 2 * self.chance_deviation
        if self.auc is None or spread < _TELLING:
            return ""
        return (
            f"\n              so few that it means nothing: chance alone gives {max(0.0, 0.5 - spread):.2f} to "
            f"{min(1.0, 0.5 + spread):.2f}. Give some {_LINES_THAT_TELL:,} lines or more"
        )


def area_under_curve(labels: NDArray[Any], scores: NDArray[Any]) -> float | None:
    """The area under the ROC curve; None if all labels are the same."""
    if labels.min() == labels.max():
        return None
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(labels, scores))


def check_measurable() -> None:
    """Check, before the work is done, that its result can be measured.

    Raises:
        UnsupportedError: If scikit-learn or torchmetrics is not installed, which measure it.
    """
    for what, module, name in (
        ("AUC", "sklearn", "scikit-learn"),
        ("calibration", "torchmetrics", "torchmetrics"),
    ):
        if importlib.util.find_spec(module) is None:
            raise UnsupportedError(
                f"the demo measures its {what} with {name}, which is not installed: pip install 'shardwright[demo]'"
            )


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
