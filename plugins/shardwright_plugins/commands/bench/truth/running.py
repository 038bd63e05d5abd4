"""A run of `bench truth`: workloads, their plans, measurements, and the estimators' judgement.

A run's JSON holds the plans, so that other estimators can be judged by the same measurements later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import asdict, frozen

from shardwright.errors import InvalidInputError, UnsupportedError
from shardwright.planning.documents import DocumentKind
from shardwright.planning.machines.host_memory import host_memory_bytes
from shardwright.planning.machines.topology import Topology
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.tables.workload import Workload
from shardwright_plugins.commands.bench.truth.figures import Judgement
from shardwright_plugins.commands.bench.truth.plans import candidates, described
from shardwright_plugins.estimators.engine import Engine
from shardwright_plugins.following.predicted import Prices
from shardwright_plugins.measuring.processor import processor

if TYPE_CHECKING:
    from shardwright_testing.ranks import RankPool

FORMAT, VERSION = "shardwright-truth", 1
_TIMEOUT_S = 1800.0
_QUICKEST = 3  # plans of the final that no estimator chose
_DOCUMENT = DocumentKind("run of bench truth")


@frozen
class TruthSettings:
    """Size of a run.

    Args:
        estimators: performance estimators to judge, by name.
        ranks: processes, one thread each.
        plans: plans of each workload.
        steps: timed steps of each run of a plan.
        rounds: runs of each plan, far apart; the least counts, and what they differ is the noise.
        finals: rounds of the final, in which the quickest plans and those that estimators chose run in turn.
    """

    estimators: tuple[str, ...]
    ranks: int = 2
    plans: int = 30
    steps: int = 40
    rounds: int = 3
    finals: int = 6


def measure(pool: RankPool, data: Mapping[str, Any], settings: TruthSettings) -> dict[str, Any]:
    """Plan a workload in many ways, and measure each plan.

    Args:
        pool: processes of the ranks.
        data: the workload as JSON data.
        settings: size of the run.

    Returns:
        ``{"workload", "reference_ms", "plans"}`` as JSON data, without any estimator's prices.
    """
    from shardwright_plugins.measuring.steps import measure_each
    from shardwright_plugins.measuring.timing import reference_ms

    workload = Workload.from_data(data)
    memory = host_memory_bytes()
    topology = Topology(
        settings.ranks,
        "cpu",
        ddr_cap=None if memory is None else memory // settings.ranks,
        detected=("ddr_cap",),
    )
    found = candidates(workload, topology, settings.estimators, count=settings.plans)
    texts = [candidate.plan.to_json() for candidate in found]

    def times(numbers: Sequence[int], rounds: int) -> list[list[dict[str, Any]]]:
        order = [numbers[place] for place in order_of_runs(len(numbers), rounds)]
        work = [(data, texts[number]) for number in order]
        results = pool.run(measure_each, settings.ranks, work, steps=settings.steps, timeout_s=_TIMEOUT_S)[0]
        runs: list[list[dict[str, Any]]] = [[] for _ in found]
        for number, figures in zip(order, results, strict=True):
            runs[number].append(asdict(figures))
        return runs

    before_ms = pool.run(reference_ms, settings.ranks)[0]
    runs = times(range(len(found)), settings.rounds)
    final = finalists([_least(own) for own in runs], [bool(candidate.chosen_by) for candidate in found])
    finals = times(final, settings.finals)
    return {
        "workload": dict(data),
        "reference_ms": [round(own, 4) for own in (before_ms, pool.run(reference_ms, settings.ranks)[0])],
        "plans": [
            {
                "label": candidate.label,
                "tables": dict(described(candidate.plan)),
                "chosen_by": list(candidate.chosen_by),
                "runs": own,
                "finals": final,
                "plan": text,
            }
            for candidate, own, final, text in zip(found, runs, finals, texts, strict=True)
        ],
    }


def finalists(step_ms: Sequence[float], is_chosen: Sequence[bool]) -> list[int]:
    """Numbers of the plans that were chosen, and of the quickest others."""
    others = [number for number, own in enumerate(is_chosen) if not own]
    return [*np.flatnonzero(is_chosen).tolist(), *sorted(others, key=step_ms.__getitem__)[:_QUICKEST]]


def order_of_runs(plans: int, rounds: int) -> list[int]:
    """Numbers of the plans, each once a round, in another order each time: a machine that grows slower favours none."""
    return [
        int(number) for seed in range(rounds) for number in np.random.default_rng(seed).permutation(plans)
    ]


def _check(workload: Workload) -> None:
    first = workload.tables[0]
    for table in workload.tables:
        if table.pooling.value == "NONE":
            raise UnsupportedError(
                f"table {table.describe()} is not pooled: bench truth measures pooled tables"
            )
        if (table.optimizer, table.is_weighted) != (first.optimizer, first.is_weighted):
            raise UnsupportedError(
                f"tables {first.describe()} and {table.describe()} have different optimizers, or only one has weights: "
                "bench truth measures collections of tables with one of each"
            )
    if workload.batch_size is None:
        raise InvalidInputError(
            f"workload {workload.name!r} has no batch_size_per_rank, so that no batch can be drawn: give --batch, or "
            "write it beside 'tables'"
        )


def judge(measured: Mapping[str, Any], estimators: Sequence[str]) -> dict[str, Any]:
    """Judge estimators by measured plans.

    Args:
        measured: plans of one workload, as :func:`measure` returns them.
        estimators: names.

    Returns:
        The same with each estimator's prices of each plan, and its judgement.
    """
    plans = [ShardingPlan.from_json(entry["plan"]) for entry in measured["plans"]]
    took = np.array([_least(entry["runs"]) for entry in measured["plans"]])
    by = {name: Prices.by(plans[0], name) for name in estimators}
    prices = {name: [own.of(plan) for plan in plans] for name, own in by.items()}
    finals = {
        number: np.array([run["step_ms"] for run in entry["finals"]])
        for number, entry in enumerate(measured["plans"])
        if entry.get("finals")
    }
    judgements = {}
    for name, own in prices.items():
        said = np.array([np.nan if one is None else one.step_ms for one in own])
        number = next((n for n, entry in enumerate(measured["plans"]) if name in entry["chosen_by"]), None)
        slower = _slower_machine(by[name], measured.get("reference_ms"))
        judgements[name] = Judgement.of(said, took, number, finals, slower).to_data()
    entries = [
        {
            **entry,
            "step_ms": round(float(took[number]), 4),
            "predicted": {
                name: asdict(priced) if (priced := own[number]) else None for name, own in prices.items()
            },
        }
        for number, entry in enumerate(measured["plans"])
    ]
    return {**measured, "plans": entries, "noise": noise_of(measured["plans"]), "estimators": judgements}


def _slower_machine(prices: Prices, now_ms: Sequence[float] | None) -> float | None:
    """Time of a fixed work now beside that when the estimator's machine was measured; ``None`` if either is unknown."""
    estimator = prices.asked.plugins.performance
    then_ms = estimator.machine.reference_ms if isinstance(estimator, Engine) else None
    return float(np.mean(now_ms)) / then_ms if now_ms and then_ms else None


def _least(runs: Sequence[Mapping[str, Any]]) -> float:
    """Measured time of a plan, ms: that of its quickest run, since other work only adds."""
    return float(min(run["step_ms"] for run in runs))


def noise_of(entries: Sequence[Mapping[str, Any]]) -> float | None:
    """Distance of the two quickest runs of a plan, as a part of the quickest: the median over plans."""
    runs = [sorted(run["step_ms"] for run in entry["runs"]) for entry in entries]
    apart = [times[1] / times[0] - 1 for times in runs if len(times) > 1]
    return round(float(np.median(apart)), 4) if apart else None


def run(
    workloads: Sequence[Mapping[str, Any]], settings: TruthSettings, *, note: Callable[[dict[str, Any]], None]
) -> None:
    """Measure and judge workloads, one after the other; each result is handed on as soon as it is there.

    Raises:
        UnsupportedError: one has tables that are not measured; nothing was measured yet.
        InvalidInputError: one has another form, or no batch size; nothing was measured yet.
    """
    from shardwright_testing.ranks import RankPool

    for data in workloads:
        _check(Workload.from_data(data))
    with RankPool(settings.ranks, backend="gloo") as pool:
        for data in workloads:
            note(judge(measure(pool, data, settings), settings.estimators))


def document(settings: TruthSettings) -> dict[str, Any]:
    """A run on this machine as JSON data, without workloads yet."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "processor": processor(),
        "settings": asdict(settings),
        "workloads": [],
    }


def read(path: Path) -> dict[str, Any]:
    """A run that was written to a file.

    Raises:
        InvalidInputError: it is no such file.
    """
    data = _DOCUMENT.read(path)
    if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (FORMAT, VERSION):
        raise InvalidInputError(
            f"{str(path)!r} is no run of bench truth: it has no format {FORMAT!r}, version {VERSION}"
        )
    settings = data.get("settings")
    if not isinstance(settings, dict) or not {"ranks", "steps"} <= settings.keys():
        raise InvalidInputError(
            f"{str(path)!r} does not say in 'settings' with how many 'ranks' and 'steps' it was measured: measure again"
        )
    return data
