"""A machine document refitted to measured times of steps: its constants times what each part is off by."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve

from shardwright.errors import InvalidInputError
from shardwright_plugins.estimators.engine.machine import Machine
from shardwright_plugins.estimators.engine.step import OF_ENGINE
from shardwright_plugins.estimators.engine.work import OF_KERNELS
from shardwright_plugins.following.predicted import Predicted
from shardwright_plugins.following.times import MeasuredTimes

_EXCHANGES = "exchanges"


def refitted(machine: Machine, predicted: Predicted, times: MeasuredTimes) -> Machine:
    """A machine by which the plan's lookups, updates and the rest of the tables' part take what they took.

    Args:
        machine: the machine that the prediction is of.
        predicted: the plan's prediction by ``engine``.
        times: measured times of steps of the plan.

    Returns:
        The machine with three factors applied: of lookups, of updates, and of all else. ``made`` has them.

    Raises:
        InvalidInputError: a part is predicted or measured to take no time, or tables were updated in the optimizer's
            step: what a machine has is what updates take in the backward pass.
    """
    in_step = [group.tables[0] for rank in times.ranks for group in rank.groups if group.update == "in_step"]
    if in_step:
        raise InvalidInputError(
            f"a machine cannot be refitted: table {in_step[0]!r} was updated in_step, which takes longer than the "
            "updates in_backward that a machine's constants are of. Measure a training with update='in_backward'"
        )
    factors = _factors(predicted, times)
    of_phase = {phase: factors.get(phase, factors[_EXCHANGES]) for phase in OF_ENGINE}
    of_name = {name: of_phase[phase] for phase, names in OF_ENGINE.items() for name in names}
    of_name |= {name: factors[phase] for phase, names in OF_KERNELS.items() for name in names}
    of_name |= {name: factors[_EXCHANGES] for name in machine.fixed}

    def scaled(constants: Mapping[str, float]) -> dict[str, float]:
        return {name: float(f"{value * of_name.get(name, 1.0):.4g}") for name, value in constants.items()}

    told = {name: round(factor, 4) for name, factor in factors.items()}
    return evolve(
        machine,
        made={**machine.made, "refitted": {"steps": times.num_steps, "ranks": len(times.ranks), **told}},
        kernels={name: scaled(own) for name, own in machine.kernels.items()},
        engine=scaled(machine.engine),
        fixed=scaled(machine.fixed),
    )


def _factors(predicted: Predicted, times: MeasuredTimes) -> dict[str, float]:
    """Measured over predicted, of kernels' phases and of all else: sums over ranks."""
    took = {phase: sum(rank.phases_ms[phase] for rank in times.ranks) for phase in OF_KERNELS}
    said = {phase: sum(predicted.phases_ms.get(phase, ())) for phase in OF_KERNELS}
    took[_EXCHANGES] = sum(rank.tables_ms for rank in times.ranks) - sum(took.values())
    said[_EXCHANGES] = sum(map(sum, predicted.phases_ms.values())) - sum(said.values())
    if none := [name for name in took if not (took[name] > 0 and said[name] > 0)]:
        raise InvalidInputError(
            f"a machine cannot be refitted: {none[0]} took {took[none[0]]:.3g} ms, and {said[none[0]]:.3g} ms are "
            "predicted. Measure a training of a plan by 'engine', on several ranks"
        )
    return {name: took[name] / said[name] for name in took}
