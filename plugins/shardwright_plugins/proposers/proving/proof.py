"""The proof of a bound by a mixed-integer program: that of all plans that would be faster has no solution.

The program is made of the options' columns alone, and solved by HiGHS; it is the one that the search asks for plans
(:mod:`shardwright_plugins.proposers.proving.program`), and nothing else of the search takes part. The solver first may
say "no plan", at the price of a time a little above the claim, so that it always has a solution to compare others with,
and its bound is to reach the claim; where it ends with a plan between the two, it is to find that there is none below.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.watch import Watch
from shardwright_plugins.proposers.proving.program import Program, has_options

_MOST_COLUMNS = 100_000
_TOLERANCE = 1e-5  # of the solver's bound; its own are 1e-6
_SOLVED = 2e-5  # part of a time by which the solver's tolerances of 1e-6 may be wrong
_LEAST_PRECISION = 0.1
_NODES = 4000  # of the solver's tree, beside a multiple of those that the search looked at
_MOST_NODES = 500_000


def why_unproven(space: SearchSpace, z_ms: float, data: Mapping[str, Any], watch: Watch) -> str:
    """Explain why it is not proven that no plan takes less than ``z_ms``; empty if it is.

    Args:
        space: options and costs; rules on ranks are left out, which can only make plans faster.
        z_ms: the claim.
        data: data of the certificate. ``nodes``: nodes of the solver's tree that the search looked at. ``precision``:
            relative precision of the bound it asked for. Both say what it takes, not what is proven.
        watch: ends the check.
    """
    claim_ms = z_ms * (1 - _SOLVED)
    most_nodes = min(20 * max(int(data["nodes"]), 0) + _NODES, _MOST_NODES)
    precision = min(max(float(data["precision"]), _TOLERANCE), _LEAST_PRECISION)
    if not has_options(space, claim_ms):
        return ""
    program = Program.of(space, claim_ms, _MOST_COLUMNS)
    if program is None:
        return f"it takes more than {_MOST_COLUMNS} numbers to state all plans, the most that are tried"
    cheap = program.mixed(1 / (1 - precision))
    bound = cheap.solve(most_nodes=most_nodes, precision=precision, watch=watch).bound
    if bound >= 1 - _TOLERANCE:
        return ""
    certain = program.mixed(may_fail=False)
    if certain.solve(most_nodes=most_nodes, precision=precision, watch=watch).is_infeasible:
        return ""
    return f"the solver proves {bound * claim_ms} ms"
