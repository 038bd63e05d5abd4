"""A calibration: experiments on ranks of this machine, constants fitted to them, and the machine document."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import numpy as np
from attrs import frozen

import shardwright
from shardwright.errors import UnsupportedError
from shardwright.planning.arrays import Floats
from shardwright.planning.machines.topology import Topology
from shardwright_plugins.commands._processor import processor
from shardwright_plugins.commands.calibrate.fitting import Fit, fit
from shardwright_plugins.commands.calibrate.kernels import KernelTimes
from shardwright_plugins.commands.calibrate.steps import alone, amounts_of_ranks
from shardwright_plugins.estimators.engine.machine import FIXED, Machine
from shardwright_plugins.estimators.engine.step import ENGINE, OF_ENGINE
from shardwright_plugins.estimators.engine.work import LOOKUP, OF_KERNELS, UPDATE
from shardwright_plugins.measuring.steps import Measured

CACHES = tuple(float(1 << power) for power in range(19, 26))
"""Sizes of a near cache that are tried, bytes: 512 KiB to 32 MiB."""
MEASURED: Mapping[str, tuple[str, ...]] = {
    "input_communication": (
        *(*OF_ENGINE["input_communication"], *OF_ENGINE["id_partition"]),
        *("copy_route", "mixed_sent"),
    ),
    "forward_compute": OF_ENGINE["forward_compute"],
    "forward_communication": ("whole_result", "cut_result", "cut_vector", "copy_result", "mixed_result"),
    "backward_communication": (*OF_ENGINE["backward_communication"], "mixed_gradient"),
    "backward_compute": OF_ENGINE["backward_compute"],
}
"""Phase of steps that is measured -> constants of the engine in it."""
_CALL = "call"
_PACKAGES = ("torch", "numba", "fbgemm-gpu-cpu")
_SECONDS_A_KERNEL = 15.0
_KERNEL_STEPS, _STEPS, _ROUNDS = 5, 10, 2
_QUICK_CASES, _QUICK_ELEMENTS = 3, 1_000_000
_TIMEOUT_S = 300.0


@frozen
class KernelFit:
    """A kernel's constants with one size of the near cache."""

    lookup: Fit
    update: Fit

    @property
    def squares(self) -> float:
        """Sum of squared relative errors."""
        return float((self.lookup.errors**2).sum() + (self.update.errors**2).sum())

    @property
    def constants(self) -> dict[str, float]:
        """Both passes' constants."""
        return {**self.lookup.constants, **self.update.constants}


def fit_kernel(times: KernelTimes, cache_bytes: float) -> KernelFit:
    """Fit a kernel's constants, for one size of the near cache.

    What any call takes is fitted beside them, and is not kept: steps are asked for it (:data:`FIXED`).
    """
    amounts = {name: own * times.tables for name, own in times.work(cache_bytes).amounts().items()}
    amounts[_CALL] = np.ones(len(times.cases))
    return KernelFit(
        fit((*LOOKUP, _CALL), amounts, times.lookup_ms), fit((*UPDATE, _CALL), amounts, times.update_ms)
    )


def fit_kernels(times: Mapping[str, KernelTimes]) -> tuple[float, dict[str, KernelFit]]:
    """Fit all kernels, with the near cache that fits them best.

    Returns:
        Bytes of the cache, and each kernel's fit.
    """
    tried = [(cache, {name: fit_kernel(own, cache) for name, own in times.items()}) for cache in CACHES]
    return min(tried, key=lambda pair: sum(own.squares for own in pair[1].values()))


def fit_phases(
    loads: Sequence[Mapping[str, Floats]],
    runs: Sequence[Measured],
    kernel: Mapping[str, float],
) -> dict[str, Fit]:
    """Fit the engine's constants to the phases of whole steps, each phase alone.

    Lookups and updates take another time in a step than alone: a factor of each is fitted too. Each phase has a part
    that any step takes, :data:`FIXED`.

    Args:
        loads: amounts of each experiment on each rank.
        runs: times of each experiment.
        kernel: constants of the kernel that all had.

    Returns:
        The fit of each phase. Errors are parts of the step's time.
    """
    step = np.array([run.step_ms for run in runs])
    amounts = amounts_of_ranks(loads) | dict.fromkeys(FIXED, np.ones(len(runs)))
    amounts |= {phase: alone(loads, kernel, names) for phase, names in OF_KERNELS.items()}
    found = {}
    for phase in runs[0].phases_ms:
        took = np.array([run.phases_ms[phase] for run in runs])
        kernels = (phase,) if phase in OF_KERNELS else ()
        found[phase] = fit((*MEASURED[phase], *kernels, *FIXED), amounts, took, beside=step)
    return found


def in_step(kernel: Mapping[str, float], fits: Mapping[str, Fit]) -> dict[str, float]:
    """A kernel's constants in a step, from those alone and the factors of the phases' fits."""
    return {
        name: _rounded(kernel[name] * fits[phase].constants[phase])
        for phase, names in OF_KERNELS.items()
        for name in names
    }


def _told(loads: Sequence[Any], runs: Sequence[Measured], fits: Mapping[str, Fit]) -> dict[str, Any]:
    """Number of experiments with steps, errors of the whole and of phases as parts of the step, and factors."""
    whole = Fit({}, sum((own.errors for own in fits.values()), np.zeros(len(runs))))
    return {
        "steps": {
            **whole.to_data(),
            **{f"{phase}_factor": _rounded(fits[phase].constants[phase]) for phase in OF_KERNELS},
        },
        **{f"steps {phase}": own.to_data() for phase, own in fits.items()},
    }


def calibrate(
    ranks: int, asked: Sequence[str] | None, note: Callable[[str], None], *, quick: bool = False
) -> Machine:
    """Measure this machine and fit its constants.

    Args:
        ranks: processes, one thread each.
        asked: compute kernels to measure; all by default.
        note: function that is called with what is measured next.
        quick: make few small experiments.

    Raises:
        UnsupportedError: no kernel can be measured here.
    """
    from shardwright_testing.ranks import RankPool

    start = time.monotonic()
    unmeasured: dict[str, str] = {}
    with RankPool(ranks, backend="gloo") as pool:
        kernels = _measured_kernels(pool, ranks, asked, unmeasured, note, quick=quick)
        cache_bytes, fits = fit_kernels(kernels)
        first = next(iter(fits))
        note("steps")
        loads, runs = _measured_steps(pool, ranks, first, cache_bytes, quick=quick)
        note("links")
        links = _measured_links(pool, ranks)
    phases = fit_phases(loads, runs, fits[first].constants)
    if ranks == 1:
        unmeasured["exchanges"] = "one rank exchanges nothing: measure with --ranks 2 or more"
    unmeasured["inter_host_bw"] = "all ranks are on one host"
    if quick:
        unmeasured["most"] = "only a few small experiments were made (--quick)"
    memory = _memory_bandwidth(kernels[first])
    others = float(np.median([run.others for run in runs]))
    return Machine(
        made=_made(ranks, time.monotonic() - start, others),
        cache_bytes=cache_bytes,
        kernels={name: in_step(own.constants, phases) for name, own in fits.items()},
        engine={
            name: _rounded(value)
            for own in phases.values()
            for name, value in own.constants.items()
            if name in ENGINE
        },
        fixed={
            name: _rounded(sum(own.constants.get(name, 0.0) for own in phases.values())) for name in FIXED
        },
        topology={"ddr_mem_bw": _rounded(memory), **{name: _rounded(value) for name, value in links.items()}},
        fits={
            **{f"{name} lookup": own.lookup.to_data() for name, own in fits.items()},
            **{f"{name} update": own.update.to_data() for name, own in fits.items()},
            **_told(loads, runs, phases),
        },
        unmeasured=unmeasured,
    )


def _rounded(value: float) -> float:
    """Four digits: constants are not known better, and documents are read by people."""
    return float(f"{value:.4g}")


def _measured_kernels(
    pool: Any,
    ranks: int,
    asked: Sequence[str] | None,
    unmeasured: dict[str, str],
    note: Callable[[str], None],
    *,
    quick: bool,
) -> dict[str, KernelTimes]:
    from shardwright_plugins.commands.calibrate.kernels import CASES, kernel_names, measure_kernel

    found: dict[str, KernelTimes] = {}
    cases = CASES[:_QUICK_CASES] if quick else CASES
    for name in asked or kernel_names():
        note(name)
        times = pool.run(
            measure_kernel,
            ranks,
            name,
            cases,
            steps=_KERNEL_STEPS,
            seconds=_SECONDS_A_KERNEL,
            timeout_s=_TIMEOUT_S,
        )[0]
        if isinstance(times, str):
            unmeasured[f"kernel {name}"] = times
        else:
            found[name] = times
    if not found:
        raise UnsupportedError(f"no compute kernel can be measured here: {unmeasured}")
    return found


def _measured_steps(
    pool: Any, ranks: int, kernel: str, cache_bytes: float, *, quick: bool
) -> tuple[list[Mapping[str, Floats]], list[Measured]]:
    """Amounts on each rank, and times, of all experiments with steps."""
    from shardwright_plugins.commands.calibrate import steps
    from shardwright_plugins.measuring.steps import measure_each

    topology = Topology(ranks, "cpu")
    found = [
        case
        for case in steps.cases()
        if not quick or case.rows * case.columns * case.tables < _QUICK_ELEMENTS
    ]
    plans = [steps.plan_of(case, topology, kernel) for case in found]
    work = [(case.workload, plan.to_json()) for case, plan in zip(found, plans, strict=True)]
    # Far apart: other programs that run for some seconds disturb one of the rounds.
    runs = pool.run(measure_each, ranks, _ROUNDS * work, steps=_STEPS, timeout_s=_TIMEOUT_S)[0]
    best = [min(runs[number :: len(work)], key=lambda run: run.step_ms) for number in range(len(work))]
    return [steps.loads_of(plan, cache_bytes) for plan in plans], best


def _measured_links(pool: Any, ranks: int) -> dict[str, float]:
    from shardwright_plugins.commands.calibrate.links import measure_links

    if ranks == 1:
        return {}
    figures: dict[str, float] = pool.run(measure_links, ranks, timeout_s=_TIMEOUT_S)[0]
    return figures


def _memory_bandwidth(times: KernelTimes) -> float:
    """Bytes a millisecond at which a rank's lookups read rows: the most of any case of wide rows."""
    work = times.work(CACHES[0])
    read = work.ids * work.row_bytes * times.tables
    return float(np.median((read / times.lookup_ms)[work.columns >= np.median(work.columns)]))


def _made(ranks: int, seconds: float, others: float) -> dict[str, Any]:
    """Provenance of a calibration."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "ranks": ranks,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "seconds": round(seconds, 1),
        "other_programs": round(others, 3),
        "shardwright": shardwright.__version__,
        **{name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"
