"""Inputs of a plan, each value with its origin: given, detected or assumed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from shardwright.arguments import brief
from shardwright.contracts.estimator import Estimator
from shardwright.errors import PlanningError
from shardwright.planning.machines.reservations import StorageReservation
from shardwright.planning.machines.topology import InputValue, Topology
from shardwright.planning.options.options import Options
from shardwright.planning.options.planning_plugins import PlanningPlugins
from shardwright.planning.plugin_calls import calling, check_answer
from shardwright.planning.tables.constraints import Constraints
from shardwright.planning.tables.optimizers import ASSUMED
from shardwright.planning.tables.workload import table_to_data
from shardwright.planning.text import count_text

_SOURCE = "TorchRec 1.8 default"
_SERVING_SOURCE = (
    "the part of memory that TorchRec 1.8 keeps free in training, the model's dense tensors where the planner has the "
    "model, and a batch of ids"
)


# What TorchRec assumes (torchrec/distributed/planner: BATCH_SIZE, and the heuristical reservation's
# percentage).
BATCH_SIZE = 512
STORAGE_RESERVATION = StorageReservation(0.15)


@frozen(eq=False)
class Request:
    """Request of a user to the planner.

    Args:
        topology: the ranks.
        constraints: constraints, by table.
        given_batch_size: samples per rank and step, if given.
        given_reservation: reservation of device memory, if given.
        assumed_reservation: reservation to plan with where none was given.
        objective: measure that rates plans; see :class:`~shardwright.planning.options.search_space.SearchSpace`.
        on_this_machine: plan for this machine, so what is installed here counts.
    """

    topology: Topology
    constraints: Constraints
    given_batch_size: int | None
    given_reservation: StorageReservation | None
    assumed_reservation: StorageReservation = STORAGE_RESERVATION
    objective: str = "largest_rank_time"
    on_this_machine: bool = False

    @property
    def batch_size(self) -> int:
        """The batch size to plan for."""
        return BATCH_SIZE if self.given_batch_size is None else self.given_batch_size

    @property
    def reservation(self) -> StorageReservation:
        """Reservation of device memory to plan with."""
        return self.assumed_reservation if self.given_reservation is None else self.given_reservation


def describe_inputs(
    request: Request,
    options: Options,
    plugins: PlanningPlugins,
    *,
    seconds: float,
    seconds_limit: float | None = None,
) -> dict[str, Any]:
    """The inputs of a plan as JSON data, for the document and the report.

    With them, all options and costs can be had again: the tables, what was asked of them, and the estimators.

    Args:
        request: request of the user.
        options: options of all tables, whose pooling factors may be assumed.
        plugins: the plugins that planned; the constants of estimators are assumptions too.
        seconds: duration of planning, s.
        seconds_limit: limit of the search, s, if there was one.
    """
    rules = [request.constraints.of(table) for table in options.all_tables]
    values = {
        "batch_size": _given_or_assumed(request.given_batch_size, BATCH_SIZE),
        "storage_reservation": _given_or_assumed(
            None if request.given_reservation is None else request.given_reservation.to_data(),
            request.assumed_reservation.to_data(),
            _SOURCE if request.assumed_reservation == STORAGE_RESERVATION else _SERVING_SOURCE,
        ),
        **request.topology.provenance,
        "seconds": InputValue(round(seconds, 4), "measured"),
    }
    if seconds_limit is not None:
        values["seconds_limit"] = InputValue(seconds_limit, "given")
    unknown = sum(rule.pooling_factors is None for rule in rules)
    if unknown:
        source = f"ids per bag of the {count_text(unknown, 'table')} whose constraints give none; {_SOURCE}"
        values["pooling_factors"] = InputValue(1.0, "assumed", source)
    unnamed = sum(table.optimizer == ASSUMED for table in options.all_tables)
    if unnamed:
        source = f"the default, for the {count_text(unnamed, 'table')} that nobody gave one"
        values["optimizer"] = InputValue(str(ASSUMED), "assumed", source)
    values.update(_estimator_values(plugins, options))
    if request.constraints.rules:
        values["constraints"] = InputValue(request.constraints.to_data(), "given")
    values["tables"] = InputValue([table_to_data(table) for table in options.all_tables], "given")
    return {name: value.to_data() for name, value in values.items()}


def assumed_inputs(inputs: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Those inputs of a plan that nobody gave or detected.

    Args:
        inputs: inputs as :func:`describe_inputs` has them.
    """
    return {name: data for name, data in inputs.items() if data.get("provenance") == "assumed"}


def under_assumed_values(inputs: Mapping[str, Any]) -> str:
    """The end of a sentence that says what is proven: `` under 9 assumed values``, or nothing.

    A bound holds for the costs of a machine. Where that is assumed, so is the bound.
    """
    count = len(assumed_inputs(inputs))
    return f" under {count} assumed value{'s' * (count > 1)}" if count else ""


def _estimator_values(plugins: PlanningPlugins, options: Options) -> dict[str, InputValue]:
    """The estimators and their constants, and what else was chosen."""
    preferred = {"estimator": plugins.performance.name, "storage_estimator": plugins.storage.name}
    values = {name: InputValue(value, "assumed", "the preferred one") for name, value in preferred.items()}
    values |= {name: InputValue(value, "given") for name, value in plugins.given.items()}
    for estimator in (plugins.performance, plugins.storage):
        for name, value in _provenance_of(estimator, options).items():
            source = f"estimator {estimator.name}"
            values[f"{estimator.name}.{name}"] = InputValue(value, "assumed", source)
    return values


def _provenance_of(estimator: Estimator, options: Options) -> Mapping[str, Any]:
    """Ask an estimator for its assumptions, and check that they are JSON data.

    Raises:
        PlanningError: it is nothing that a plan document can hold.
    """
    who = f"estimator {estimator.name!r}"
    with calling(who):
        assumed = estimator.provenance(options)
    check_answer(who, "provenance", assumed, Mapping[str, object])
    try:
        json.dumps(dict(assumed))
    except (TypeError, ValueError) as error:
        raise PlanningError(
            f"{who} broke its contract: provenance() must be JSON data, it is {brief(assumed)}: {error}"
        ) from error
    return assumed


def _given_or_assumed(value: Any, default: Any, source: str = _SOURCE) -> InputValue:
    return InputValue(default, "assumed", source) if value is None else InputValue(value, "given")
