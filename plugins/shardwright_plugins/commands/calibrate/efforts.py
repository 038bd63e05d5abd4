"""Efforts of kernels, told by steps: what any step takes more, and times of the engine's constants.

Legend: E experiments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from attrs import evolve

from shardwright.planning.arrays import Floats
from shardwright.planning.plan.plan import ShardingPlan
from shardwright_plugins.commands.calibrate import steps
from shardwright_plugins.commands.calibrate.fitting import Fit, fit, rounded
from shardwright_plugins.estimators.engine.machine import Machine
from shardwright_plugins.measuring.steps import Measured


def with_efforts(
    machine: Machine, measured: Mapping[tuple[str, str], tuple[Sequence[ShardingPlan], Sequence[Measured]]]
) -> Machine:
    """The machine with the efforts of kernels that its steps were not measured with, for all data types of rows."""
    for (kernel, effort), (plans, runs) in measured.items():
        if not plans:
            continue
        found = fit_effort(machine, kernel, effort, plans, np.array([run.step_ms for run in runs]))
        fits = {**machine.fits, f"{kernel} {effort}": found.to_data()}
        machine = evolve(with_effort(machine, kernel, effort, rounded(found.constants[effort])), fits=fits)
    return machine


def fit_effort(
    machine: Machine, kernel: str, effort: str, plans: Sequence[ShardingPlan], took: Floats
) -> Fit:
    """Fit an effort of a kernel; the time of a step is linear in it.

    Args:
        machine: constants of the machine.
        kernel: the kernel.
        effort: one of ``steps.OF_KERNELS_ALONE``.
        plans: plans of tables of that kernel alone, of the effort's sharding type.
        took: times of their steps, ms: ``[E]``.
    """
    once, twice = (
        np.array([steps.step_ms_by(with_effort(machine, kernel, effort, times), plan) for plan in plans])
        for times in (1.0, 2.0)
    )
    of_kernel = 2 * once - twice
    found = fit((effort,), {effort: twice - once}, np.maximum(took - of_kernel, 0.0), beside=took)
    return Fit(found.constants, found.constants[effort] * (twice - once) / took + of_kernel / took - 1)


def with_effort(machine: Machine, kernel: str, effort: str, times: float) -> Machine:
    """The machine with another effort of a kernel, for all data types of rows."""
    kernels = {
        name: {**own, effort: times} if name.split()[0] == kernel else own
        for name, own in machine.kernels.items()
    }
    return evolve(machine, kernels=kernels)
