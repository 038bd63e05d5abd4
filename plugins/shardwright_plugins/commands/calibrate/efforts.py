"""Efforts of kernels, told by steps: their times in a step, what any step takes more, and the engine's work for them.

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
from shardwright_plugins.estimators.engine.machine import STEP, Machine
from shardwright_plugins.estimators.engine.work import OF_KERNELS
from shardwright_plugins.measuring.steps import Measured


def with_efforts(
    machine: Machine, measured: Mapping[tuple[str, str], tuple[Sequence[ShardingPlan], Sequence[Measured]]]
) -> Machine:
    """The machine with the efforts of kernels that its steps were not measured with, for all data types of rows."""
    for (kernel, effort), (plans, runs) in measured.items():
        if not plans:
            continue
        if effort == STEP:
            machine = with_times(machine, kernel, factors_of(machine, kernel, plans, runs))
        found = fit_effort(machine, kernel, effort, plans, np.array([run.step_ms for run in runs]))
        fits = {**machine.fits, f"{kernel} {effort}": found.to_data()}
        machine = evolve(with_effort(machine, kernel, effort, rounded(found.constants[effort])), fits=fits)
    return machine


def factors_of(
    machine: Machine, kernel: str, plans: Sequence[ShardingPlan], runs: Sequence[Measured]
) -> dict[str, float]:
    """Times of a kernel's lookups and updates in steps, beside those that the machine has: phase -> factor.

    Args:
        machine: constants of the machine, by factors of the kernel that steps were measured with.
        kernel: the kernel.
        plans: plans of whole tables of that kernel alone.
        runs: times of their steps.
    """
    loads = [steps.loads_of(plan, machine.cache_bytes) for plan in plans]
    step, factors = np.array([run.step_ms for run in runs]), {}
    for phase, names in OF_KERNELS.items():
        amounts = {phase: steps.alone(loads, machine.kernels[kernel], names), STEP: np.ones(len(runs))}
        took = np.array([run.phases_ms[phase] for run in runs])
        factors[phase] = fit((phase, STEP), amounts, took, beside=step).constants[phase]
    return factors


def with_times(machine: Machine, kernel: str, factors: Mapping[str, float]) -> Machine:
    """The machine with a kernel's constants of phases times factors, for all data types of rows."""
    times = {name: factors[phase] for phase, names in OF_KERNELS.items() for name in names}
    kernels = {
        name: {**own, **{constant: rounded(own[constant] * factor) for constant, factor in times.items()}}
        if name.split()[0] == kernel
        else own
        for name, own in machine.kernels.items()
    }
    return evolve(machine, kernels=kernels)


def fit_effort(
    machine: Machine, kernel: str, effort: str, plans: Sequence[ShardingPlan], took: Floats
) -> Fit:
    """Fit an effort of a kernel, with which steps grow evenly.

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
