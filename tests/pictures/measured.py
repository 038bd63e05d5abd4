"""Keep what the picture needs of measured plans: `python -m tests.pictures.measured TRUTH`.

The file comes from `shardwright bench truth --drawn 1 --seed 605 --plans 30 --steps 12 --rounds 2 --output TRUTH`, with
`--estimator` thrice: `engine`, `roofline`, `torchrec`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("measured.json")


def reduced(truth: Mapping[str, Any]) -> dict[str, Any]:
    """Times of each plan, ms, and what was measured."""
    (workload,) = truth["workloads"]
    plans = [
        {
            "measured_ms": plan["step_ms"],
            "predicted_ms": {name: one["step_ms"] for name, one in plan["predicted"].items()},
        }
        for plan in workload["plans"]
    ]
    kept = {key: truth[key] for key in ("processor", "settings")}
    name = workload["workload"]["name"]
    return {**kept, "workload": name, "estimators": truth["settings"]["estimators"], "plans": plans}


if __name__ == "__main__":
    FILE.write_text(json.dumps(reduced(json.loads(Path(sys.argv[1]).read_text())), indent=1) + "\n")
