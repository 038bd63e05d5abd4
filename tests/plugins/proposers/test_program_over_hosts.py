"""The mixed-integer program of all built-in sharding types over hosts: gangs, and equal plans for equal input."""

from __future__ import annotations

import attrs
import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.core.planning.test_program import value_of

from shardwright.planning.constraints import Constraints
from shardwright.planning.enumeration import enumerate_options
from shardwright.planning.program import Program
from shardwright.planning.space import estimate_costs
from shardwright.planning.tables import TableSpec
from shardwright.planning.topology import Topology
from shardwright.plugins import host


def hosts_space(rows, *, ranks=4, local=2, mib=64):
    """All built-in sharding types over two hosts, gangs among them."""
    tables = [TableSpec(f"t{i}", count, 64, ["f"]) for i, count in enumerate(rows)]
    topology = Topology(ranks, "cpu", ddr_cap=mib << 20, local_world_size=local)
    options = enumerate_options(tables, topology, Constraints(), host(), batch_size=64)
    make = host().estimators.create
    return estimate_costs(
        options, topology, make("roofline"), make("weights_and_buffers"), topology.capacity_bytes
    )


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.sampled_from([10, 500, 20_000, 60_000]), min_size=1, max_size=4), mib=st.integers(8, 64)
)
def test_program_over_hosts_keeps_gangs_together_and_says_what_its_plan_takes(rows, mib):
    space = hosts_space(rows, mib=mib)
    assume(np.isfinite(space.bound.possible_ms))
    program = Program.of(space, 10 * space.bound.possible_ms, most_columns=5000)
    solution = program.solve(most_nodes=100)
    assume(solution.proposal is not None)
    value = value_of(space, solution)
    assert solution.bound_ms <= value * (1 + 1e-6)
    assert value <= program.limit_ms * (1 + 1e-6)


def test_program_under_equal_input_gives_equal_plans():
    space = hosts_space([500, 500, 20_000, 60_000], mib=16)
    again = attrs.evolve(space)
    limit = 3 * space.bound.possible_ms
    first, second = (Program.of(each, limit, most_columns=5000).solve() for each in (space, again))
    assert (first.proposal == second.proposal).all()
    assert (first.ranks == second.ranks).all()
