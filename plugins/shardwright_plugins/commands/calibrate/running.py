"""A calibration: experiments on ranks of this machine, constants fitted to them, and the machine document."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from typing import Any

import numpy as np
from attrs import frozen

import shardwright
from shardwright.errors import PlanningError, UnsupportedError
from shardwright.planning.arrays import Floats
from shardwright.planning.machines.topology import Topology
from shardwright.planning.plan.plan import ShardingPlan
from shardwright_plugins.commands.calibrate import steps
from shardwright_plugins.commands.calibrate.efforts import with_efforts
from shardwright_plugins.commands.calibrate.fitting import Fit, fit, rounded
from shardwright_plugins.commands.calibrate.hosts import (
    HostClass,
    host_classes,
    mean_times,
    speeds_of_ranks,
)
from shardwright_plugins.commands.calibrate.kernels import KernelTimes, kernel_names
from shardwright_plugins.commands.calibrate.ranks import Ranks
from shardwright_plugins.estimators.engine.machine import BASE, FIXED, Machine, cores_a_rank, kernel_key
from shardwright_plugins.estimators.engine.step import ENGINE, OF_ENGINE, until_all_have_computed
from shardwright_plugins.estimators.engine.work import LOOKUP, OF_KERNELS, UPDATE
from shardwright_plugins.measuring.processor import processor
from shardwright_plugins.measuring.steps import Measured
from shardwright_plugins.measuring.timing import REFERENCE_ROUNDS, reference_ms

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
_KERNEL_STEPS, _STEPS = 5, 10
_WARM_S = 6.0
"""Time of the fixed work before the measurement that counts, s: processors that did nothing are slower at first."""
_QUICK = "only a few small experiments were made (--quick)"
_QUICK_CASES, _QUICK_ELEMENTS, _QUICK_ROUNDS = 3, 900_000, 12


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
    ends: Callable[[Floats], float],
) -> dict[str, Fit]:
    """Fit the engine's constants to the phases of whole steps, each phase alone.

    Lookups and updates take another time in a step than alone: a factor of each is fitted too. Each phase has a part
    that any step takes, :data:`FIXED`. All are scaled so that as many steps come out too long as too short.

    Args:
        loads: amounts of each experiment on each rank.
        runs: times of each experiment.
        kernel: constants of the kernel that all had.
        ends: function of the times of each rank, ``[W]``, to what all wait for.

    Returns:
        The fit of each phase. Errors are parts of the step's time.
    """
    step = np.array([run.step_ms for run in runs])
    amounts = steps.amounts_of_ranks(loads, ends) | dict.fromkeys(FIXED, np.ones(len(runs)))
    amounts |= {phase: steps.alone(loads, kernel, names, ends) for phase, names in OF_KERNELS.items()}
    found, shares = dict[str, Fit](), dict[str, Floats]()
    for phase in runs[0].phases_ms:
        took = np.array([run.phases_ms[phase] for run in runs])
        shares[phase] = took / step
        kernels = (phase,) if phase in OF_KERNELS else ()
        found[phase] = fit((*MEASURED[phase], *kernels, *FIXED), amounts, took, beside=step)
    # Runs that were disturbed are longer, and count less by their relative errors: steps would come out too short.
    whole = sum((own.errors for own in found.values()), np.ones(len(runs)))
    scale = 1 / float(np.median(whole))
    return {phase: own.scaled(scale, shares[phase]) for phase, own in found.items()}


def in_step(kernel: Mapping[str, float], fits: Mapping[str, Fit]) -> dict[str, float]:
    """A kernel's constants in a step, from those alone and the factors of the phases' fits."""
    return {
        name: rounded(kernel[name] * fits[phase].constants[phase])
        for phase, names in OF_KERNELS.items()
        for name in names
    }


def _told(runs: Sequence[Measured], fits: Mapping[str, Fit]) -> dict[str, Any]:
    """Number of experiments with steps, errors of the whole and of phases as parts of the step, and factors."""
    whole = Fit({}, sum((own.errors for own in fits.values()), np.zeros(len(runs))))
    return {
        "steps": {
            **whole.to_data(),
            **{f"{phase}_factor": rounded(fits[phase].constants[phase]) for phase in OF_KERNELS},
        },
        **{f"steps {phase}": own.to_data() for phase, own in fits.items()},
    }


def calibrate(
    ranks: Ranks,
    asked: Sequence[str] | None,
    note: Callable[[str], None],
    *,
    precisions: Sequence[str] = (),
    quick: bool = False,
) -> Machine:
    """Measure the machine of some ranks and fit its constants.

    1. Every rank: kernels, one after the other, with all ranks at the same time.
    2. Every rank: exchanges inside hosts and between them, then whole steps.
    3. Every rank fits constants to the results of all, which are the same everywhere but for rounding. The caller
       writes the machine of the first.

    Args:
        ranks: ranks to measure, one thread each.
        asked: compute kernels to measure; all by default.
        note: function that is called with what is measured next.
        precisions: further data types of rows to measure kernels with.
        quick: make few small experiments.

    Raises:
        UnsupportedError: no kernel can be measured here with rows of :data:`BASE`, or of one of ``precisions``;
            before anything is measured.
        DistributedError: a rank failed, or does not answer.
    """
    start, unmeasured = time.monotonic(), dict[str, str]()
    rounds = _QUICK_ROUNDS if quick else REFERENCE_ROUNDS
    begun_s, references = ranks.run(time.monotonic)[0], [ranks.run(reference_ms, rounds)[0]]
    # Processors that have done nothing are slower for some seconds: only the last of these counts.
    while not quick and ranks.run(time.monotonic)[0] - begun_s < _WARM_S:
        references = [ranks.run(reference_ms, rounds)[0]]
    names = asked or ranks.run(kernel_names)[0]
    # Steps are measured with rows of BASE, by the first kernel that is measured: none of another type before it.
    experiments = [(name, precision) for precision in dict.fromkeys((BASE, *precisions)) for name in names]
    of_ranks = _measured_kernels(ranks, experiments, unmeasured, note, quick=quick)
    classes = host_classes(of_ranks, ranks.run(processor), ranks.local_size)
    slowest = min(classes, key=lambda own: own.speed)
    kernels = {name: mean_times(own, slowest.hosts, ranks.local_size) for name, own in of_ranks.items()}
    cache_bytes, fits = fit_kernels(kernels)
    first = next(iter(fits))
    note("links")
    links, device, copies = _measured_links(ranks)
    note("steps")
    references.append(ranks.run(reference_ms, rounds)[0])
    plans, runs = _measured_steps(ranks, steps.cases(), first, links, quick=quick)
    loads = [steps.loads_of(plan, cache_bytes) for plan in plans]
    ends = partial(
        until_all_have_computed,
        cores_a_rank=cores_a_rank(_cores(), ranks.local_size),
        ranks_a_host=ranks.local_size,
    )
    phases = fit_phases(loads, runs, fits[first].constants, ends)
    of_efforts = {
        (name, effort): _measured_steps(ranks, steps.effort_cases(effort), name, links, quick=quick)
        for name in names
        if name in fits and name != first
        for effort in steps.OF_KERNELS_ALONE
    }
    references.append(ranks.run(reference_ms, rounds)[0])
    memory = _memory_bandwidth(kernels[first])
    others = float(np.median([run.others for run in runs]))
    speeds = speeds_of_ranks(classes, ranks.local_size)
    speed: dict[str, Any] = {"speed": speeds} if speeds else {}
    machine = Machine(
        made={
            **_made(ranks, classes, time.monotonic() - start, others),
            **device,
            "reference_ms": [rounded(own) for own in references],
        },
        cache_bytes=cache_bytes,
        kernels={name: in_step(own.constants, phases) for name, own in fits.items()},
        engine={
            name: rounded(value)
            for own in phases.values()
            for name, value in own.constants.items()
            if name in ENGINE
        },
        fixed={name: rounded(sum(own.constants.get(name, 0.0) for own in phases.values())) for name in FIXED},
        topology={
            **{name: rounded(value) for name, value in {"ddr_mem_bw": memory, **links, **copies}.items()},
            **speed,
        },
        fits={
            **{f"{name} lookup": own.lookup.to_data() for name, own in fits.items()},
            **{f"{name} update": own.update.to_data() for name, own in fits.items()},
            **_told(runs, phases),
        },
        unmeasured={**unmeasured, **_not_there(ranks, device)} | ({"most": _QUICK} if quick else {}),
    )
    return with_efforts(machine, of_efforts)


def _not_there(ranks: Ranks, device: Mapping[str, str]) -> dict[str, str]:
    """List what cannot be measured with such ranks, with the reasons."""
    reasons = {
        "exchanges": (ranks.size == 1, "one rank exchanges nothing: measure with --ranks 2 or more"),
        "inter_host_bw": (ranks.num_hosts == 1, "all ranks are on one host"),
        "intra_host_bw": (ranks.local_size == 1 < ranks.size, "each rank is on a host of its own"),
        "hbm_to_ddr_mem_bw": (not device, "not every rank has an accelerator that torch sees"),
    }
    return {name: reason for name, (is_so, reason) in reasons.items() if is_so}


def _measured_kernels(
    ranks: Ranks,
    experiments: Sequence[tuple[str, str]],
    unmeasured: dict[str, str],
    note: Callable[[str], None],
    *,
    quick: bool,
) -> dict[str, list[KernelTimes]]:
    """Times on each rank of each kernel with each data type of rows."""
    from shardwright_plugins.commands.calibrate.kernels import CASES, measure_kernel, refusal_of

    found: dict[str, list[KernelTimes]] = {}
    cases = CASES[:_QUICK_CASES] if quick else CASES
    seconds = _SECONDS_A_KERNEL / len({precision for _, precision in experiments})
    refused = {own: ranks.run(refusal_of, own[0], cases, own[1])[0] for own in experiments}
    for precision in dict.fromkeys(precision for _, precision in experiments):
        reasons = {name: why for (name, own), why in refused.items() if own == precision}
        if all(reasons.values()):
            raise UnsupportedError(
                f"no compute kernel can be measured here with rows of {precision}: "
                f"{'; '.join(f'{name}: {why}' for name, why in reasons.items())}"
            )
    for (name, precision), why in refused.items():
        key = kernel_key(name, precision)
        if why:
            unmeasured[f"kernel {key}"] = why
            continue
        note(key)
        found[key] = ranks.run(measure_kernel, name, cases, precision, steps=_KERNEL_STEPS, seconds=seconds)
    return found


def _measured_steps(
    ranks: Ranks,
    cases: Sequence[steps.StepCase],
    kernel: str,
    links: Mapping[str, float],
    *,
    quick: bool,
) -> tuple[list[ShardingPlan], list[Measured]]:
    """Plans and times of experiments with steps; of none that the kernel cannot do."""
    from shardwright_plugins.measuring.steps import MOST_TRIES, measure_each

    topology = _topology(ranks, links)
    work, plans = [], []
    for case in cases:
        if quick and case.rows * case.columns * case.tables >= _QUICK_ELEMENTS:
            continue
        try:
            plan = steps.plan_of(case, topology, kernel)
        except PlanningError:  # it has no copies, or no such optimizer
            continue
        plans.append(plan)
        work.append((case.workload, plan.to_json()))
    tries = 1 if quick else MOST_TRIES
    best = ranks.run(measure_each, work, steps=_STEPS, most_tries=tries)[0]
    # Far apart: other programs that run for some seconds disturb one of the runs.
    unsteady = [place for place, run in enumerate(best) if not (quick or run.is_steady)]
    again = ranks.run(measure_each, [work[place] for place in unsteady], steps=_STEPS)[0]
    for place, run in zip(unsteady, again, strict=True):
        best[place] = min(best[place], run, key=lambda one: one.step_ms)
    if ranks.num_hosts > 1:
        best = [steps.without_travel(run, plan) for run, plan in zip(best, plans, strict=True)]
    return plans, best


def _topology(ranks: Ranks, links: Mapping[str, float]) -> Topology:
    """The ranks with the links that were measured."""
    ending = "_latency_ms"
    return Topology(
        ranks.size,
        "cpu",
        local_world_size=ranks.local_size,
        intra_host_bw=links.get("intra_host_bw"),
        inter_host_bw=links.get("inter_host_bw"),
        link_latencies_ms={
            name.removesuffix(ending): value for name, value in links.items() if name.endswith(ending)
        },
    )


def _measured_links(ranks: Ranks) -> tuple[dict[str, float], dict[str, str], dict[str, float]]:
    """Links between ranks; the type of their accelerators, if all have one; and the slowest rank's copies to it."""
    from shardwright_plugins.commands.calibrate.links import measure_copies, measure_links

    links: dict[str, float] = ranks.run(measure_links)[0]
    told = ranks.run(measure_copies)
    if not all(told) or len(kinds := {own.pop("device") for own in told}) > 1:
        return links, {}, {}
    return links, {"device": kinds.pop()}, {name: min(own[name] for own in told) for name in told[0]}


def _memory_bandwidth(times: KernelTimes) -> float:
    """Bytes a millisecond at which a rank's lookups read rows: the most of any case of wide rows."""
    work = times.work(CACHES[0])
    read = work.ids * work.row_bytes * times.tables
    return float(np.median((read / times.lookup_ms)[work.columns >= np.median(work.columns)]))


def _made(ranks: Ranks, classes: Sequence[HostClass], seconds: float, others: float) -> dict[str, Any]:
    """Provenance of a calibration; the processor is that of the slowest hosts."""
    several = (
        {}
        if ranks.num_hosts == 1
        else {"hosts": ranks.num_hosts, "classes": [own.to_data() for own in classes]}
    )
    return {
        "processor": min(classes, key=lambda own: own.speed).processor,
        "cores": _cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "ranks": ranks.size,
        **several,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "seconds": round(seconds, 1),
        "other_programs": round(others, 3),
        "shardwright": shardwright.__version__,
        **{name: _version(name) for name in _PACKAGES},
    }


def _cores() -> int:
    return os.cpu_count() or 1


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"
