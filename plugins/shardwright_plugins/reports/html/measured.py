"""The page of a run of ``bench truth``: a picture a workload and estimator, in which each plan is a dot.

Legend: P plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from shardwright_plugins.reports.html.charts import HEADROOM, HEIGHT, MS, Scale
from shardwright_plugins.reports.html.page import TEMPLATES, resource

_TITLE = "Predicted and measured times of plans"


def measured_page(data: Mapping[str, Any]) -> str:
    """The page of a run, as ``bench truth`` writes it.

    Args:
        data: JSON data of the run: its processor, settings, and the workloads with plans and judgements.
    """
    return TEMPLATES.get_template("measured.html.j2").render(
        data=data, title=_TITLE, style=resource("page.css"), pictures=list(_pictures(data["workloads"]))
    )


@frozen
class Dots:
    """Dots of plans over a line on which those are that were predicted exactly.

    Args:
        name: the id of the figure.
        title: text above it.
        points: measured and predicted time of each plan, ms: ``P``.
        notes: text of each plan, shown when it is pointed at: ``P``.
        scale: format of times, which is that of both axes.
    """

    name: str
    title: str
    points: Sequence[tuple[float, float]]
    notes: Sequence[str]
    scale: Scale = MS

    @property
    def top(self) -> float:
        """Time at the ends of both axes, ms."""
        return HEADROOM * max((ms for point in self.points for ms in point), default=0.0) or 1.0

    def place(self, ms: float) -> float:
        """Place of a time on an axis, of :data:`~shardwright_plugins.reports.html.charts.HEIGHT`."""
        return HEIGHT * ms / self.top


def _pictures(workloads: Sequence[Mapping[str, Any]]) -> Iterator[Dots]:
    for number, workload in enumerate(workloads):
        for place, (estimator, own) in enumerate(workload["estimators"].items()):
            plans = [plan for plan in workload["plans"] if plan["predicted"].get(estimator) is not None]
            points = [(plan["step_ms"], plan["predicted"][estimator]["step_ms"]) for plan in plans]
            correlation = "none" if own["spearman"] is None else f"{own['spearman']:.2f}"
            judged = f"rank correlation {correlation}, median error {own['median_error']:.0%}"
            yield Dots(
                f"measured-{number}-{place}",
                f"{workload['workload'].get('name', '')}: {estimator}, {judged}",
                points,
                [
                    f"{plan['label']}: {MS.text(took)} measured, {MS.text(said)} predicted"
                    for plan, (took, said) in zip(plans, points, strict=True)
                ],
            )
