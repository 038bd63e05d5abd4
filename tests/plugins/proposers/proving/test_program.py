"""The mixed-integer program against all plans there are, over hosts too."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st
from tests.drawn import drawn
from tests.plugins.proposers.proving.test_bounds import best_by_trying_all, prover_of, space_of
from tests.plugins.proposers.spaces import costed

from shardwright import ParameterConstraints, PlanError, TableSpec, Topology, Watch
from shardwright.host import host
from shardwright.planning.proofs import why_unproven
from shardwright.planning.search.placement import propose
from shardwright.planning.tables.constraints import Constraints
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


def hosts_space(rows, *, dim=64, ranks=4, local=2, mib=64, constraints=None, batch_size=64):
    """All built-in sharding types over two hosts, gangs among them."""
    tables = [TableSpec(f"t{i}", count, dim, ["f"]) for i, count in enumerate(rows)]
    topology = Topology(ranks, "cpu", ddr_cap=mib << 20, local_world_size=local)
    return costed(
        tables,
        topology,
        constraints=Constraints(constraints),
        estimators=("roofline", "weights_and_buffers"),
        batch_size=batch_size,
    )


@drawn(
    rows=st.lists(st.sampled_from([10, 500, 20_000, 60_000]), min_size=1, max_size=4),
    mib=st.integers(8, 64),
    quick=8,
    thorough=50,
)
def test_program_over_hosts_keeps_gangs_together_and_says_what_its_plan_takes(rows, mib):
    space = hosts_space(rows, mib=mib)
    assume(np.isfinite(prover_of(space).possible_ms))
    program = Program.of(space, 10 * prover_of(space).possible_ms, most_columns=5000)
    proven, plan = solved(program, program_nodes=100)
    assume(plan is not None)
    value = value_of(space, plan)
    assert proven.bound_ms <= value * (1 + 1e-6)
    assert value <= program.limit_ms * (1 + 1e-6)


@pytest.mark.parametrize("times", [1.01, 2, 1000])
def test_program_of_more_gangs_on_a_host_than_there_are_tables_proves_nothing_false(times):
    cut, whole = ["grid_shard"], ["table_wise"]
    rules = {
        name: ParameterConstraints(sharding_types=types, compute_kernels=["fused_torch"], min_partition=32)
        for name, types in (("t0", cut), ("t1", whole))
    }
    space = hosts_space([85_196, 20_316], dim=256, mib=32, constraints=rules)
    _, plan = solved(Program.of(space, 100 * prover_of(space).possible_ms, most_columns=5000))
    value = value_of(space, plan)
    assert len(set(space.options.gang[space.options.shards_of(int(plan[0][0]))].tolist())) > 2
    claim = {"z_ms": value * times, "program": {"nodes": 10, "precision": 2.5e-3}}
    assert "the solver proves" in why_unproven(space, value * times, claim, host().extensions)
