"""dynamic_programming: the least time for each amount of memory, table after table."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from shardwright.contracts.proposer import Proposals, Proposer
from shardwright.planning.arrays import Floats, Ints
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.watch import Watch
from shardwright_plugins.proposers.dominance import efficient_options

NUM_BINS = 200
# A proposal for each of so many amounts of memory, from the most there is downwards.
_PROPOSALS = 60


class DynamicProgramming(Proposer):
    """The multiple-choice knapsack problem by dynamic programming over memory (Dudzinski and Walukiewicz 1987).

    The device's memory of all ranks is cut into 200 parts, and every option takes whole parts. For each number of parts
    the options of least time together are found, and proposed: from all parts downwards, as shards may not fill every
    rank to the brim. As TorchRec's ``DynamicProgrammingProposer`` does, it looks at one memory tier, the device's own;
    options that do not fit alone are left out.
    """

    name: ClassVar[str] = "dynamic_programming"

    def proposals(self, space: SearchSpace, watch: Watch) -> Proposals:
        """Propose the options of least time together, for less and less memory."""
        best, taken = _solved(space)
        reachable = np.flatnonzero(np.isfinite(best))[::-1]
        seen: set[bytes] = set()
        for parts in reachable.tolist():
            proposal = _traced(space, taken, parts)
            if proposal.tobytes() not in seen and len(seen) < _PROPOSALS:
                seen.add(proposal.tobytes())
                yield proposal


def _parts(space: SearchSpace) -> Ints:
    """Count the parts of the device's memory that each option takes, rounded to the nearest: ``[O]``."""
    capacity = max(int(space.capacity_bytes[:, 0].sum()), 1)
    return np.rint(space.total_bytes[:, 0] * (NUM_BINS / capacity)).astype(np.int64)


def _solved(space: SearchSpace) -> tuple[Floats, Ints]:
    """The least time for exactly so many parts ``[P]``, and the option that each table takes there: ``[A, P]``."""
    parts, efficient = _parts(space), efficient_options(space)
    alike = space.options.distinct_table
    best = np.full(NUM_BINS + 1, np.inf)
    best[0] = 0.0
    taken = np.full((len(alike), NUM_BINS + 1), -1)
    for table, distinct in enumerate(alike.tolist()):
        after = np.full_like(best, np.inf)
        for option in space.options.of_table(distinct):
            size = int(parts[option])
            if not efficient[option] or size > NUM_BINS:
                continue
            reached = best[: NUM_BINS + 1 - size] + space.total_cost_ms[option]
            is_less = reached < after[size:]
            after[size:][is_less] = reached[is_less]
            taken[table, size:][is_less] = option
        best = after
    return best, taken


def _traced(space: SearchSpace, taken: Ints, parts: int) -> Ints:
    size = _parts(space)
    proposal = np.empty(len(taken), dtype=np.int64)
    for table in range(len(taken) - 1, -1, -1):
        proposal[table] = taken[table, parts]
        parts -= int(size[proposal[table]])
    return proposal
