"""What went into a plan, each value with where it came from: given, detected or assumed."""

from __future__ import annotations

from typing import Any

import attrs
from attrs import frozen

from shardwright.contracts.estimator import Estimator
from shardwright.planning.constraints import Constraints, ParameterConstraints
from shardwright.planning.options import Options
from shardwright.planning.topology import Provenance, Topology

_SOURCE = "TorchRec 1.8 default"


@frozen(eq=False)
class Request:
    """What the user asked the planner for.

    Args:
        topology: the ranks.
        constraints: by table.
        batch_size: samples per rank and step, if given.
        reservation: the part of the device's memory to keep free, if given.
    """

    topology: Topology
    constraints: Constraints
    batch_size: int | None
    reservation: float | None

    def batch_size_or(self, default: int) -> int:
        """The batch size to plan for."""
        return default if self.batch_size is None else self.batch_size

    def reservation_or(self, default: float) -> float:
        """The part of the device's memory to keep free."""
        return default if self.reservation is None else self.reservation


def describe_inputs(
    request: Request, options: Options, batch_size: int, reservation: float, performance: Estimator
) -> dict[str, Any]:
    """The inputs of a plan as JSON data, for the document and the report.

    Args:
        request: what was asked.
        options: for the tables, whose pooling factors may be assumed.
        batch_size: what is assumed where no batch size was given.
        reservation: what is assumed where no reservation was given.
        performance: the estimator, whose constants are assumptions too.
    """
    rules = [request.constraints.of(table) for table in options.tables]
    values = {
        "batch_size": _given_or_assumed(request.batch_size, batch_size),
        "storage_reservation": _given_or_assumed(request.reservation, reservation),
        **request.topology.provenance,
    }
    unknown = sum(rule.pooling_factors is None for rule in rules)
    if unknown:
        source = f"ids per bag of the {unknown} tables whose constraints give none; {_SOURCE}"
        values["pooling_factors"] = Provenance(1.0, "assumed", source)
    for name, value in performance.provenance().items():
        values[f"{performance.name}.{name}"] = Provenance(value, "assumed", f"estimator {performance.name}")
    if request.constraints.rules:
        rules_data = {key: _rule_data(rule) for key, rule in request.constraints.rules.items()}
        values["constraints"] = Provenance(rules_data, "given")
    return {name: provenance.to_data() for name, provenance in values.items()}


def _given_or_assumed(value: Any, default: Any) -> Provenance:
    return Provenance(default, "assumed", _SOURCE) if value is None else Provenance(value, "given")


def _rule_data(rule: ParameterConstraints) -> dict[str, Any]:
    fields = attrs.asdict(rule, filter=lambda _, value: value is not None)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
