"""What each stage of the proving search is worth: its plans with every stage, and without each in turn.

python -m tests.benchmarks.planning.plan_ablation [--workloads FOLDER] [--without STAGE ...] [--seconds 3] [--sample 1]
    [--before BEFORE.json] [--output ablation.json]

The instances are those of ``plan_instances.py``: drawn ones always, and workload files where a folder of them is
given (with the sizes that the performance page has rows for). Each search ends after so many seconds of the process's
CPU time, whatever else the machine does. ``--without`` alone names no stage: then only the whole search is measured;
left out, every stage is left out in turn. ``--sample 4`` takes every fourth problem. ``--before`` holds the results
of another version, from ``--output``, and takes the place of the whole search as what others are compared with.

Prints for each run: the geometric mean of the plans' times against the whole search's, the parts of the instances
that are within 0.3 and 3 %, the worst, the plans that only one of the two found, the median gap, and CPU seconds. The
rule: a stage without which no drawn instance's plan or gap is 1 % worse leaves.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from tests.benchmarks.planning.plan_instances import TIGHTNESS, Problem, drawn, of_files, with_memory

from shardwright import SearchSpace, StorageReservation, Topology, Watch
from shardwright.host import host
from shardwright.planning.search.search import search
from shardwright_plugins.proposers.proving import Proving
from shardwright_plugins.proposers.proving.effort import STAGES, Effort

_SHAPES = ("1x8", "2x8", "4x8")
# The rows of the performance page: workload, hosts x ranks; and GiB of device memory.
_ROWS = (
    ("nvidia_synthetic_small", "1x8"),
    ("nvidia_synthetic_medium", "2x8"),
    ("nvidia_synthetic_jumbo", "16x8"),
    ("nvidia_synthetic_colossal", "64x8"),
)
_ROW_GIB = (28, 32, 40, 64, 80)
_GIB = 1 << 30

Result = dict[str, Any]


def main() -> None:
    """Measure the whole search, then the others."""
    arguments = _arguments()
    runs = {"all": _measured(arguments, frozenset())}
    _write(arguments, runs)
    before = json.loads(arguments.before.read_text())["all"] if arguments.before else runs["all"]
    print(_HEADER)
    print(_compared("all", before, runs["all"]), flush=True)
    for stage in STAGES if arguments.without is None else arguments.without:
        runs[stage] = _measured(arguments, frozenset([stage]))
        _write(arguments, runs)
        print(_compared(f"without {stage}", before, runs[stage]), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workloads", type=Path, help="a folder of workload files")
    parser.add_argument("--without", nargs="*", choices=STAGES)
    parser.add_argument("--seconds", type=float, default=3.0, help="CPU seconds of a search")
    parser.add_argument("--sample", type=int, default=1, help="take one of so many problems")
    parser.add_argument("--only", nargs="*", help="sets of problems: rows, files, drawn")
    parser.add_argument("--before", type=Path, help="the output of another version")
    parser.add_argument("--output", type=Path, help="where to write the results, as JSON")
    return parser.parse_args()


def _write(arguments: argparse.Namespace, runs: Mapping[str, Sequence[Result]]) -> None:
    if arguments.output:
        arguments.output.write_text(json.dumps(runs, indent=1))


def _problems(arguments: argparse.Namespace) -> Iterator[tuple[str, Problem, Sequence[float]]]:
    """Each problem with its set and its memory: in GiB for the page's rows, else in parts of the least."""
    found = [("drawn", problem, TIGHTNESS) for problem in drawn()]
    if arguments.workloads:
        found += [("files", problem, TIGHTNESS) for problem in of_files(arguments.workloads, _SHAPES)]
        for name, shape in _ROWS:
            for problem in of_files(arguments.workloads, [shape], only=[name]):
                found += [
                    ("rows", attrs.evolve(problem, estimator=estimator), _ROW_GIB)
                    for estimator in ("torchrec", None)
                ]
    kept = [each for each in found if not arguments.only or each[0] in arguments.only]
    yield from kept[:: arguments.sample]


def _measured(arguments: argparse.Namespace, without: frozenset[str]) -> list[Result]:
    """The results of all instances, without some stages."""
    results = []
    for of_set, problem, memory in _problems(arguments):
        whole = problem.space()
        for size in memory:
            space = _with_gib(whole, problem, size) if of_set == "rows" else with_memory(whole, size)
            found = _searched(space, problem, without, arguments.seconds)
            instance = {"set": of_set, "name": problem.name, "shape": problem.shape, "memory": size}
            results.append({**instance, "estimator": problem.estimator, **found})
    return results


def _with_gib(space: SearchSpace, problem: Problem, gib: float) -> SearchSpace:
    """A problem whose ranks have so much device memory, of which 15 % are kept free."""
    topology = Topology(
        space.topology.world_size,
        "cuda",
        local_world_size=space.topology.local_world_size,
        hbm_cap=int(gib * _GIB),
        ddr_cap=problem.ddr_gib * _GIB,
    )
    ids_per_batch = float(space.options.ids_per_batch @ space.options.multiplicity)
    capacity = StorageReservation(0.15).capacity_bytes(topology, ids_per_batch)
    return attrs.evolve(space, topology=topology, capacity_bytes=capacity)


class _CpuWatch(Watch):
    """A watch of the process's CPU time; a solver, which keeps to seconds of the clock, gets as many more of them."""

    _wall_s: float = 0.0

    @property
    def seconds_left(self) -> float:
        """Seconds of the clock that the rest of the CPU time is about to take."""
        ratio = (time.monotonic() - self._wall_s) / max(self.elapsed_s, 0.05)
        return super().seconds_left * max(1.0, ratio)


def _searched(space: SearchSpace, problem: Problem, without: frozenset[str], seconds: float) -> Result:
    plugins = problem.choice(Proving(Effort(without=without))).resolve(host())
    watch, start = _CpuWatch(seconds, clock=time.process_time), time.process_time()
    watch._wall_s = time.monotonic()
    found = search(
        space,
        plugins.proposers,
        plugins.partitioner,
        plugins.plugin_host.extensions,
        watch=watch,
    )
    return {
        "value_ms": found.plan.value_ms,
        "bound_ms": found.lower_bound_ms,
        "cpu_s": time.process_time() - start,
        "work_us": watch.spent_us,
    }


_HEADER = (
    f"{'run':24s} {'set':6s} {'n':>4s} {'mean':>7s} {'0.3 %':>6s} {'3 %':>6s} {'worst':>6s} {'lost':>4s} {'won':>4s} "
    f"{'gap':>7s} {'cpu s':>6s} {'1 % worse: plan':>15s} {'gap':>4s}"
)


def _compared(name: str, before: Sequence[Result], after: Sequence[Result]) -> str:
    """A line of the table for each set."""
    known, lines = {_key(result): result for result in before}, []
    for of_set in dict.fromkeys(result["set"] for result in after):
        pairs = [(known[_key(r)], r) for r in after if r["set"] == of_set and _key(r) in known]
        lines.append(f"{name:24s} {of_set:6s} {_line(pairs)}")
    return "\n".join(lines)


def _key(result: Result) -> tuple[Any, ...]:
    return tuple(result[key] for key in ("set", "name", "shape", "memory", "estimator"))


def _line(pairs: Sequence[tuple[Result, Result]]) -> str:
    is_found = [(math.isfinite(was["value_ms"]), math.isfinite(now["value_ms"])) for was, now in pairs]
    lost, won = is_found.count((True, False)), is_found.count((False, True))
    both = [pair for pair, found in zip(pairs, is_found, strict=True) if all(found)]
    ratio = np.array([now["value_ms"] / was["value_ms"] for was, now in both])
    gaps = np.array([(_gap(was), _gap(now)) for was, now in both])
    within = [(ratio <= 1 + part).sum() / max(len(both) + lost, 1) for part in (0.003, 0.03)]
    return (
        f"{len(pairs):4d} {np.exp(np.log(ratio).mean()):7.4f} {within[0]:6.1%} {within[1]:6.1%} {ratio.max():6.3f} "
        f"{lost:4d} {won:4d} {np.median(gaps[:, 1]):7.2%} {sum(now['cpu_s'] for _, now in pairs):6.0f} "
        f"{(ratio > 1.01).sum() + lost:15d} {(gaps[:, 1] > gaps[:, 0] + 0.01).sum():4d}"
    )


def _gap(result: Result) -> float:
    return result["value_ms"] / max(result["bound_ms"], 1e-300) - 1


if __name__ == "__main__":
    main()
