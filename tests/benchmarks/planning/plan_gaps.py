"""How far from proven best the plans of workload files are: over topologies, and memory from ample to scarce.

python -m tests.benchmarks.planning.plan_gaps WORKLOADS [--only NAME ...] [--topologies 1x8 2x8 ...]
    [--output gaps.json]

An instance is a workload, hosts x ranks of a host, and how much memory each rank has: so many times what it needs at
least (see ``plan_instances.py``). Prints each instance, then the distribution of the gaps, the worst instances, and the
seconds of the search; ``--before`` compares the values with those of an earlier output. With ``--seconds`` a search
ends at that limit with what it has. ``--output`` is written after each instance; a run that was broken off goes on
where it ended with ``--resume``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from tests.benchmarks.planning.plan_instances import TIGHTNESS, of_files, with_memory

from shardwright.host import host
from shardwright.planning.options.planning_plugins import PlanningPlugins, PluginChoice
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.search.search import search
from shardwright.planning.watch import Watch

TOPOLOGIES = ("1x4", "1x8", "2x8", "4x8", "16x8", "64x8")


def main() -> None:
    """Measure the instances that are asked for."""
    arguments = _arguments()
    plugins = PluginChoice(arguments.estimator, arguments.storage_estimator).resolve(host())
    found = _measured_before(arguments)
    known = {_key(result) for result in found}
    for instance, space in _instances(arguments, known):
        result = _searched(instance, space, plugins, Watch(arguments.seconds))
        found.append(result)
        print(_line(result), flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps(found, indent=1))
    _print_distribution(found)
    if arguments.before:
        _print_changes(found, json.loads(arguments.before.read_text()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("workloads", type=Path, help="a folder of workload files")
    parser.add_argument("--only", nargs="*", help="names of workloads; all by default")
    parser.add_argument("--topologies", nargs="*", default=TOPOLOGIES)
    parser.add_argument("--tightness", nargs="*", type=float, default=TIGHTNESS)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--ddr-gib", type=int, default=128)
    parser.add_argument(
        "--estimator", default="torchrec:published_options=true", help="the performance estimator"
    )
    parser.add_argument("--storage-estimator", default="torchrec_storage")
    parser.add_argument("--seconds", type=float, help="how long a search may take; no limit by default")
    parser.add_argument("--output", type=Path, help="where to write the results, as JSON")
    parser.add_argument("--resume", action="store_true", help="leave out what the output has already")
    parser.add_argument("--before", type=Path, help="an earlier output to compare with")
    return parser.parse_args()


def _measured_before(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    if not (arguments.resume and arguments.output and arguments.output.exists()):
        return []
    found: list[dict[str, Any]] = json.loads(arguments.output.read_text())
    return found


def _key(instance: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(instance[name] for name in ("workload", "topology", "tightness"))


def _instances(
    arguments: argparse.Namespace, known: set[tuple[Any, ...]]
) -> Iterator[tuple[dict[str, Any], SearchSpace]]:
    """Each instance that is not known yet, with its problem."""
    for problem in of_files(arguments.workloads, arguments.topologies, arguments.batch, arguments.only):
        names = {"workload": problem.name, "topology": problem.shape}
        new = [each for each in arguments.tightness if (*names.values(), each) not in known]
        asked = attrs.evolve(problem, estimator=arguments.estimator, ddr_gib=arguments.ddr_gib)
        space = asked.space() if new else None
        for tightness in new:
            assert space is not None  # where something is new
            yield {**names, "tightness": tightness}, with_memory(space, tightness)


def _searched(
    instance: dict[str, Any], space: SearchSpace, plugins: PlanningPlugins, watch: Watch
) -> dict[str, Any]:
    start = time.process_time()
    result = search(
        space,
        plugins.proposers,
        plugins.partitioner,
        plugins.plugin_host.extensions,
        watch=watch,
    )
    seconds = time.process_time() - start
    value, bound = result.plan.value_ms, result.lower_bound_ms
    gap = value / bound - 1 if 0 < bound <= value < math.inf else (0.0 if value == bound else math.inf)
    is_infeasible = math.isinf(value) and bound > space.most_ms
    return {
        **instance,
        "tables": len(space.options.all_tables),
        "value_ms": value,
        "bound_ms": bound,
        "gap": 0.0 if is_infeasible else gap,
        "is_infeasible": is_infeasible,
        "seconds": seconds,
    }


def _line(result: dict[str, Any]) -> str:
    name = "{workload:24s} {topology:>5s} x{tightness:<5g}".format(**result)
    if result["is_infeasible"]:
        return f"{name} no plan, proven                              {result['seconds']:6.2f} s"
    return name + " value {value_ms:10.5g} bound {bound_ms:10.5g} gap {gap:8.2%} {seconds:6.2f} s".format(
        **result
    )


def _print_distribution(found: list[dict[str, Any]]) -> None:
    for shape in [*dict.fromkeys(result["topology"] for result in found), "all"]:
        mine = [result for result in found if shape in ("all", result["topology"])]
        gaps = np.array([result["gap"] for result in mine])
        seconds = np.array([result["seconds"] for result in mine])
        print(
            f"{shape:>5s}: {len(mine)} instances; gap <= 0.3 %: {(gaps <= 0.003).mean():.1%}, <= 1 %: "
            f"{(gaps <= 0.01).mean():.1%}, <= 3 %: {(gaps <= 0.03).mean():.1%}, median {np.median(gaps):.2%}; "
            f"search seconds: median {np.median(seconds):.3f}, 90 % {np.quantile(seconds, 0.9):.2f}, "
            f"most {seconds.max():.2f}, all {seconds.sum():.1f}"
        )
    print("worst:")
    for result in sorted(found, key=lambda result: -result["gap"])[:12]:
        print("  " + _line(result))


def _print_changes(found: list[dict[str, Any]], before: list[dict[str, Any]]) -> None:
    old = {_key(result): result for result in before}
    pairs = [(old[_key(new)], new) for new in found if _key(new) in old]
    better = [new for was, new in pairs if new["value_ms"] < was["value_ms"] * (1 - 1e-3)]
    worse = [(was, new) for was, new in pairs if new["value_ms"] > was["value_ms"] * (1 + 1e-3)]
    tighter = [new for was, new in pairs if new["bound_ms"] > was["bound_ms"] * (1 + 1e-3)]
    looser = [(was, new) for was, new in pairs if new["bound_ms"] < was["bound_ms"] * (1 - 1e-3)]
    print(
        f"against before, {len(pairs)} instances: value better {len(better)}, worse {len(worse)}; "
        f"bound better {len(tighter)}, worse {len(looser)}"
    )
    for was, new in worse + looser:
        print(f"  {_line(new)}   before: value {was['value_ms']:.5g} bound {was['bound_ms']:.5g}")


if __name__ == "__main__":
    sys.exit(main())
