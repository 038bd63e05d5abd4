"""The mixed-integer program against all plans there are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st
from tests.drawn import drawn
from tests.plugins.proposers.proving.test_bounds import best_by_trying_all, space_of

from shardwright import PlanError, Watch
from shardwright.host import host
from shardwright.planning.proofs import why_unproven
from shardwright.planning.search.placement import propose
from shardwright_plugins.proposers.proving.effort import Effort
from shardwright_plugins.proposers.proving.program import Program

PRECISION = Effort().precision
CLOSE = 1 + PRECISION + 1e-4


def solved(program, **effort):
    """What the solver proves, and the plan that it finds."""
    return program.solve(Effort(**effort), Watch())


def value_of(space, plan):
    """The largest rank's time of a solution that keeps within memory."""
    proposal, ranks = plan
    shards = propose(space, proposal)
    assert len(ranks) == len(shards)
    excess = shards.used_bytes(ranks) - shards.capacity_bytes
    assert (excess <= 1e-6 * shards.capacity_bytes).all()
    hosts = ranks // shards.local_world_size
    for gang in set(shards.gang[shards.gang >= 0].tolist()):
        assert len(set(hosts[shards.gang == gang].tolist())) == 1
    pinned = shards.local_rank >= 0
    assert (ranks[pinned] % shards.local_world_size == shards.local_rank[pinned]).all()
    return float(shards.loads_ms(ranks).max())


@drawn(
    rows=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    capacity=st.integers(200, 4000),
    part=st.sampled_from([0.7, 1.02, 1.3, 4.0]),
    quick=10,
    thorough=40,
)
def test_program_of_small_problems_finds_the_best_plan_and_bounds_it(rows, capacity, part):
    space = space_of(rows, capacity=capacity)
    best = best_by_trying_all(space)
    assume(np.isfinite(best))
    program = Program.of(space, best * part * (1 + 1e-6), most_columns=1000)
    if program is None:
        assert part < 1
        return
    proven, plan = solved(program)
    assert proven.bound_ms <= best * (1 + 1e-9)
    if part >= 1:
        assert value_of(space, plan) <= best * CLOSE
        assert proven.bound_ms * CLOSE >= best
    else:
        assert plan is None
        assert proven.bound_ms * CLOSE >= program.limit_ms


def test_program_too_large_is_none():
    assert Program.of(space_of([10, 20, 30]), 1e9, most_columns=3) is None


def test_certificate_of_a_program_is_proven_again_and_a_higher_claim_is_not():
    space = space_of([50, 50, 50], capacity=2500)
    best = best_by_trying_all(space)
    program = Program.of(space, 2 * best, most_columns=1000)
    data = solved(program)[0].certificate
    assert data["z_ms"] == pytest.approx(best, rel=PRECISION + 1e-4)
    assert why_unproven(space, data["z_ms"], data, host().extensions) == ""
    for part in (1.1, 3):
        told = why_unproven(space, part * best, {**data, "z_ms": part * best}, host().extensions)
        assert "the solver proves" in told
    with pytest.raises(PlanError, match="malformed"):
        why_unproven(space, best, {"z_ms": best, "program": {}}, host().extensions)


@drawn(
    rows=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    capacity=st.integers(200, 4000),
    part=st.sampled_from([0.3, 0.9, 0.999, 1.001, 1.1]),
    quick=10,
    thorough=40,
)
def test_no_plan_below_a_time_is_proven_anew_up_to_the_best_plans_and_not_beyond(rows, capacity, part):
    space = space_of(rows, capacity=capacity)
    best = best_by_trying_all(space)
    claim = best * part if np.isfinite(best) else 1e6
    told = why_unproven(
        space, claim, {"z_ms": claim, "program": {"nodes": 1, "precision": PRECISION}}, host().extensions
    )
    assert (told == "") == (claim < best)
