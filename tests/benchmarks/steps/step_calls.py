"""The calls that a training step makes on one of two ranks: 24 tables of 10k x 16, batch 64, 2 ids a bag.

    python tests/benchmarks/steps/step_calls.py
    python tests/benchmarks/steps/step_calls.py --types row_wise --functions 60

Counted with sys.setprofile, in the step of twenty that makes the fewest. With --functions it lists who makes most.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.distributed.steps import call_workers

from shardwright_testing.ranks import RankPool


def main(
    types: Annotated[
        list[str] | None, typer.Option(help="Sharding types, dealt to the tables in turn.")
    ] = None,
    functions: Annotated[int, typer.Option(min=0, help="Functions to list.")] = 0,
) -> None:
    """Print the number of Python and C calls for each mix of sharding types."""
    print(f"{'Python':>7} {'C':>7}  types")
    with RankPool(2, backend="gloo") as ranks:
        for mix in types or call_workers.MIXES:
            calls = min(ranks.run(call_workers.calls_of_step, 2, mix), key=lambda own: own.num_all)
            print(f"{calls.python.total():7d} {calls.native.total():7d}  {mix}")
            for kind in (calls.python, calls.native):
                _print_most(kind, functions)


def _print_most(calls: Counter[str], number: int) -> None:
    for name, count in calls.most_common(number):
        print(f"{count:15d}  {re.sub('^.*(site-packages|shardwright)/', '', name, count=1)}")


if __name__ == "__main__":
    typer.run(main)
