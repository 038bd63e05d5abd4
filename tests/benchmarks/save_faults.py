"""kill -9 of all ranks while they save, at random moments: does the newest complete checkpoint load, each time?

    python -m tests.benchmarks.save_faults [--times 100] [--seed 0] [--folder DIR] [--json]

The kills go in turn over the ways to save of :mod:`tests.distributed.checkpoints.checkpoint_victims`. After each, the
newest checkpoint is loaded with its checksums, each weight is compared with that of its step, and another job saves
into the folder. A kill that leaves something else ends the campaign with the error.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import attrs
from tests.distributed.checkpoints.checkpoint_victims import WAYS, Strike, strike


def campaign(times: int, seed: int, folder: Path) -> list[Strike]:
    """The kills, one after the other."""
    found = []
    for number in range(times):
        own = folder / str(number)
        found.append(strike(WAYS[number % len(WAYS)], own, random.Random(f"{seed}/{number}")))
        shutil.rmtree(own)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="on the disk to be used; a temporary one by default")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        found = campaign(asked.times, asked.seed, Path(folder))
    if asked.json:
        print(json.dumps([attrs.asdict(each) for each in found], indent=1))
        return
    print(f"{'way':10}{'under way':22}{'kills':>6}{'newest loads':>14}")
    for (how, struck), count in sorted(Counter((each.how, each.struck) for each in found).items()):
        print(f"{how:10}{struck:22}{count:6}{count:14}")


if __name__ == "__main__":
    main()
