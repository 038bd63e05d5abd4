"""Objectives that rate a plan: functions of the ranks' times, in milliseconds.

Legend: W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from shardwright.errors import UnknownNameError, nearest
from shardwright.planning.arrays import Floats

Phases: TypeAlias = Mapping[str, Floats]
"""Phase of a step -> milliseconds of each rank: ``[W]``."""


def largest_rank_time(phases: Phases) -> float:
    """The time of the rank that takes longest, all phases together (what TorchRec minimises)."""
    return float(np.sum(list(phases.values()), axis=0).max())


def step_time(phases: Phases) -> float:
    """The step as it really happens: each phase ends with a collective, and lasts as long as on its slowest rank.

    It is never less than :func:`largest_rank_time`, so a bound of that is one of this.
    """
    return float(sum(loads.max() for loads in phases.values()))


OBJECTIVES: Mapping[str, Callable[[Phases], float]] = {
    "largest_rank_time": largest_rank_time,
    "step_time": step_time,
    "serving": largest_rank_time,  # of tables that are only looked up: the latency of a batch on the slowest rank
}
LARGEST_RANK_TIME = "largest_rank_time"
SERVING = "serving"
"""Objective of plans for serving: tables are planned as :meth:`~shardwright.planning.tables.spec.TableSpec.served`."""


OBJECTIVE_TEXTS: Mapping[str, str] = {
    SERVING: "latency of a batch on the slowest rank: ids out, lookups, results back"
}
"""Explanations of objectives for reports, where the name does not say it all."""


def checked_objective(name: str) -> str:
    """The name of an objective.

    Raises:
        UnknownNameError: there is none of that name; the text has those there are.
    """
    if not isinstance(name, str) or name not in OBJECTIVES:
        raise UnknownNameError(
            f"no objective {name!r}. Known: {', '.join(OBJECTIVES)}.{nearest(str(name), OBJECTIVES)}"
        )
    return name
