"""Every command of the command line, run in one process at small sizes: `python -m ... FOLDER` keeps what they print.

What Python writes to ``sys.stdout`` is caught. So what arrives at the process's standard output was written below
Python, by a library.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from unittest import mock

import typer

from shardwright.cli import app, main
from shardwright.host import host

TABLES = [
    {"name": f"t{i}", "num_embeddings": 1000 * (i + 1), "embedding_dim": 32, "pooling_factor": 1.0}
    for i in range(6)
]
WORKLOAD = {"name": "little", "batch_size_per_rank": 64, "tables": TABLES}

COMMANDS = {
    "plan": "workloads/little.json --ranks 4 --hbm-gib 1 --partitioner longest_first --output plan.json",
    "check": "plan.json",
    "explain": "plan.json --table t0",
    "diff": "plan.json plan.json",
    "docs": "engine",
    "profile": "workloads/little.json ids.parquet --output rules.json",
    "doctor": "",
    "plugins": "",
    "plugin new": "acme --kind codec --output made",
    "bench truth": "workloads/little.json --ranks 1 --plans 2 --steps 1 --rounds 1 --estimator roofline",
    "calibrate": "--ranks 1 --kernel fused_torch --quick --output machine.json",
    "checkpoint convert": "weights.pt saved --step 1",
    "checkpoint show": "saved",
    "checkpoint verify": "saved",
}
"""Command -> its arguments, in an order in which each finds what it reads."""


def names() -> set[str]:
    """All commands, of core and of plugins, with those below them."""
    context = typer.main.get_command(app).make_context("shardwright", ["doctor"])
    found = set()
    for name in context.command.list_commands(context):
        command = context.command.resolve_command(context, [name])[1]
        found |= {f"{name} {inner}" for inner in getattr(command, "commands", {})} or {name}
    return found


def run(command: str, arguments: str) -> tuple[int, str]:
    """The exit code of a command, and what Python printed."""
    out = io.StringIO()
    words = ["shardwright", *command.split(), *arguments.split()]
    with mock.patch.object(sys, "argv", words), contextlib.redirect_stdout(out):
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0), out.getvalue()
    return 0, out.getvalue()


def _main() -> None:
    import pyarrow.parquet
    import torch

    Path("workloads").mkdir()
    Path("workloads/little.json").write_text(json.dumps(WORKLOAD))
    torch.save({"bags.embedding_bags.t0.weight": torch.zeros(10, 4)}, "weights.pt")
    ids = pyarrow.table({f"t{i}_f0": [number % 7 for number in range(200)] for i in range(6)})
    pyarrow.parquet.write_table(ids, "ids.parquet")
    host().fingerprint()
    printed = {name: run(name, arguments) for name, arguments in COMMANDS.items()}
    Path("printed.json").write_text(json.dumps({"names": sorted(names()), "printed": printed}))


if __name__ == "__main__":
    _main()
