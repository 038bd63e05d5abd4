"""What went into a plan, each value with where it came from: given, detected or assumed."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from shardwright.contracts.estimator import Estimator
from shardwright.planning.constraints import Constraints
from shardwright.planning.options import Options
from shardwright.planning.topology import Provenance, Topology

_SOURCE = "TorchRec 1.8 default"


# What TorchRec assumes (torchrec/distributed/planner: BATCH_SIZE, and the heuristical reservation's
# percentage).
BATCH_SIZE = 512
STORAGE_RESERVATION = 0.15


@frozen(eq=False)
class Request:
    """What the user asked the planner for.

    Args:
        topology: the ranks.
        constraints: by table.
        given_batch_size: samples per rank and step, if given.
        given_reservation: the part of the device's memory to keep free, if given.
    """

    topology: Topology
    constraints: Constraints
    given_batch_size: int | None
    given_reservation: float | None

    @property
    def batch_size(self) -> int:
        """The batch size to plan for."""
        return BATCH_SIZE if self.given_batch_size is None else self.given_batch_size

    @property
    def reservation(self) -> float:
        """The part of the device's memory to keep free."""
        return STORAGE_RESERVATION if self.given_reservation is None else self.given_reservation


def describe_inputs(request: Request, options: Options, performance: Estimator) -> dict[str, Any]:
    """The inputs of a plan as JSON data, for the document and the report.

    Args:
        request: what was asked.
        options: for the tables, whose pooling factors may be assumed.
        performance: the estimator, whose constants are assumptions too.
    """
    rules = [request.constraints.of(table) for table in options.all_tables]
    values = {
        "batch_size": _given_or_assumed(request.given_batch_size, BATCH_SIZE),
        "storage_reservation": _given_or_assumed(request.given_reservation, STORAGE_RESERVATION),
        **request.topology.provenance,
    }
    unknown = sum(rule.pooling_factors is None for rule in rules)
    if unknown:
        source = f"ids per bag of the {unknown} tables whose constraints give none; {_SOURCE}"
        values["pooling_factors"] = Provenance(1.0, "assumed", source)
    for name, value in performance.provenance().items():
        values[f"{performance.name}.{name}"] = Provenance(value, "assumed", f"estimator {performance.name}")
    if request.constraints.rules:
        values["constraints"] = Provenance(request.constraints.to_data(), "given")
    return {name: provenance.to_data() for name, provenance in values.items()}


def _given_or_assumed(value: Any, default: Any) -> Provenance:
    return Provenance(default, "assumed", _SOURCE) if value is None else Provenance(value, "given")
