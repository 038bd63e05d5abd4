"""Which options a mixed-integer program needs."""

from __future__ import annotations

import numpy as np
from tests.plugins.proposers.spaces import costed

from shardwright.planning.options import NO_GANG
from shardwright.planning.program_options import Candidates
from shardwright.planning.tables import TableSpec
from shardwright.planning.topology import Topology


def space_over_hosts():
    topology = Topology(4, "cpu", ddr_cap=64 << 20, local_world_size=2)
    tables = [TableSpec(f"t{rows}", rows, 64, ["f"]) for rows in (9000, 500, 40)]
    return costed(tables, topology)


def test_candidates_of_gangs_leave_out_what_another_one_is_never_worse_than():
    space = space_over_hosts()
    options = space.options
    kept = Candidates(space, np.inf).options()
    gangs = [o for o in kept if (options.gang[options.shards_of(o)] != NO_GANG).any()]
    kinds = [(int(options.table[option]), options.type_of(option).name) for option in gangs]
    # Kernels of one type cut alike: where one takes no more time and memory than the others, it alone is needed.
    assert {"grid_shard", "table_column_wise", "table_row_wise"} == {name for _, name in kinds}
    assert len(kinds) == len(set(kinds))
