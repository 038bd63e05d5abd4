"""Efforts of kernels: times of the engine's constants for tables whose rows are cut, or copied.

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
    fits, kernels = dict(machine.fits), {name: dict(own) for name, own in machine.kernels.items()}
    for (kernel, effort), (plans, runs) in measured.items():
        if not plans:
            continue
        found = fit_effort(machine, kernel, effort, plans, np.array([run.step_ms for run in runs]))
        fits[f"{kernel} {effort}"] = found.to_data()
        for name, own in kernels.items():
            if name.split()[0] == kernel:
                own[effort] = rounded(found.constants[effort])
    return evolve(machine, kernels=kernels, fits=fits)


def fit_effort(
    machine: Machine, kernel: str, effort: str, plans: Sequence[ShardingPlan], took: Floats
) -> Fit:
    """Fit an effort of a kernel: what is left of steps beside its lookups and updates grows with it.

    Args:
        machine: constants of the machine, all kernels with the same efforts.
        kernel: the kernel.
        effort: one of :data:`EFFORTS`.
        plans: plans of tables of that kernel, cut or copied.
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
    """The machine with another effort of a kernel."""
    kernels = {**machine.kernels, kernel: {**machine.kernels[kernel], effort: times}}
    return evolve(machine, kernels=kernels)
