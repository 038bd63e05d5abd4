"""The mixed-integer program of all built-in sharding types over hosts: gangs, and equal plans for equal input."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st
from tests.drawn import drawn
from tests.plugins.proposers.proving.test_bounds import prover_of
from tests.plugins.proposers.proving.test_program import solved, value_of
from tests.plugins.proposers.spaces import costed

from shardwright import ParameterConstraints, TableSpec, Topology
from shardwright.host import host
from shardwright.planning.proofs import why_unproven
from shardwright.planning.tables.constraints import Constraints
from shardwright_plugins.proposers.proving.program import Program


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
