"""How long `plan_tables()` takes, and its process's memory, against the number of tables: a fresh process each.

python tests/benchmarks/planning/plan_times.py WORKLOAD.json [--tables 100 300 1000 2000 5000] [--ranks 128] [--local 8]
    [--hbm-gib 80] [--batch 8192] [--estimator torchrec]
    [--storage-estimator torchrec_storage] [--distinct] [--repeats 3] [--output times.json]

So many tables are taken from the workload, over and over under new names. With ``--distinct`` no two have the same
number of rows, so that none can be planned as another. What is timed is the call alone; the process's start, with the
import of the planner and of its plugins, is a column of its own. Of several repeats the fastest is shown.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_TIMEOUT_S = 600
_GIB = 1 << 30


def main() -> None:
    """Measure every number of tables, or, in a process of its own, one."""
    arguments = _arguments()
    if arguments.alone:
        print(json.dumps(_planned(arguments)))
        return
    found = []
    print(f"{'tables':>7s} {'plan ms':>9s} {'start ms':>9s} {'peak MB':>8s} {'ms/table':>9s} {'gap':>8s}")
    for number in arguments.tables:
        result = min((_in_process(number) for _ in range(arguments.repeats)), key=lambda one: one["plan_ms"])
        found.append(result)
        print(
            "{tables:7d} {plan_ms:9.1f} {start_ms:9.1f} {peak_mb:8.0f} {per_table_ms:9.4f} {gap:8.2%}".format(
                **result
            ),
            flush=True,
        )
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("workload", type=Path)
    parser.add_argument("--tables", nargs="*", type=int, default=[100, 300, 1000, 2000, 5000])
    parser.add_argument("--ranks", type=int, default=128)
    parser.add_argument("--local", type=int, default=8)
    parser.add_argument("--hbm-gib", type=float, default=80)
    parser.add_argument("--ddr-gib", type=float, default=128)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--estimator")
    parser.add_argument("--storage-estimator")
    parser.add_argument("--distinct", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _in_process(number: int) -> dict[str, Any]:
    """The figures of one number of tables, by a process of its own with our options."""
    words = [sys.executable, *sys.argv, "--alone", "--tables", str(number)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _planned(arguments: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    import attrs

    from shardwright.planning.machines.topology import Topology
    from shardwright.planning.tables.constraints import Constraints
    from shardwright.planning.tables.workload import Workload
    from shardwright.runtime.sharded.models.planner import EmbeddingShardingPlanner

    (number,) = arguments.tables
    workload = Workload.read(arguments.workload)
    of_table = workload.constrained(Constraints(None)).of
    tables, rules = [], {}
    for index in range(number):
        table = workload.tables[index % len(workload.tables)]
        rows = table.num_embeddings + (index if arguments.distinct else 0)
        tables.append(attrs.evolve(table, name=f"table_{index}", num_embeddings=rows))
        rules[tables[-1].path] = of_table(table)
    topology = Topology(
        arguments.ranks,
        "cuda",
        local_world_size=arguments.local,
        hbm_cap=int(arguments.hbm_gib * _GIB),
        ddr_cap=int(arguments.ddr_gib * _GIB),
    )
    planner = EmbeddingShardingPlanner(
        topology,
        arguments.batch,
        constraints=rules,
        estimator=arguments.estimator,
        storage_estimator=arguments.storage_estimator,
    )
    middle = time.perf_counter()
    plan = planner.plan_tables(tables)
    plan_ms = (time.perf_counter() - middle) * 1e3
    return {
        "tables": number,
        "plan_ms": plan_ms,
        "start_ms": (middle - start) * 1e3,
        "per_table_ms": plan_ms / number,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        **{name: plan.document["objective"][name] for name in ("value_ms", "lower_bound_ms", "gap")},
    }


if __name__ == "__main__":
    main()
