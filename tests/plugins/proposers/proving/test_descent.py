"""Descents over options and ranks: nothing gets lost, the measure falls, and a rank that is too full is relieved."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from tests.drawn import drawn
from tests.plugins.proposers.spaces import costed

from shardwright import TableSpec, Topology, Watch
from shardwright.planning.search.placement import propose
from shardwright_plugins.proposers.proving.descent import descended
from shardwright_plugins.proposers.proving.effort import Effort
from shardwright_plugins.proposers.proving.packing.assignment import Assignment, Catalogue

MIB = 1 << 20
TABLES = st.lists(st.tuples(st.integers(1, 20_000), st.sampled_from([16, 64, 128])), min_size=1, max_size=8)


def space_of(shapes, *, ranks=4, local=2, mib=64):
    topology = Topology(ranks, "cpu", ddr_cap=mib * MIB, local_world_size=local)
    tables = [TableSpec(f"t{index}", rows, dim, ["f"]) for index, (rows, dim) in enumerate(shapes)]
    return costed(tables, topology)


def start_in(space, limit_ms):
    """The cheapest efficient option of each table, everything on the first ranks."""
    catalogue = Catalogue(space, Watch())
    cost = np.where(catalogue.is_efficient, space.total_cost_ms, np.inf)
    first = space.options.first_option
    cheapest = [int(first[t] + np.argmin(cost[first[t] : first[t + 1]])) for t in range(len(first) - 1)]
    start = Assignment(catalogue, np.array(cheapest)[space.options.distinct_table], limit_ms)
    start.fill()
    return start


@drawn(shapes=TABLES, local=st.sampled_from([1, 2, 4]), part=st.floats(0.3, 2.0), quick=15, thorough=80)
def test_descended_loads_are_those_of_its_plan(shapes, local, part):
    space = space_of(shapes, local=local)
    start = start_in(space, 1.0)
    start.bins.within(part * float(start.bins.used[:, 0].max()))
    result = descended(start, Effort())
    shards = propose(space, result.proposal)
    loads = shards.fixed_ms + np.bincount(result.ranks, weights=shards.cost_ms, minlength=4)
    assert result.bins.used[:, 0] == pytest.approx(loads)
    gangs = {}
    for gang, rank in zip(shards.gang.tolist(), result.ranks.tolist(), strict=True):
        if gang >= 0:
            gangs.setdefault(gang, set()).add(rank // local)
    assert all(len(hosts) == 1 for hosts in gangs.values())
