"""Tables of three sizes, each many times: what the search for many tables that are alike is tried on."""

from __future__ import annotations

from shardwright.planning.constraints import Constraints
from shardwright.planning.enumeration import enumerate_options
from shardwright.planning.space import SearchSpace, estimate_costs
from shardwright.planning.tables import TableSpec
from shardwright.planning.topology import Topology
from shardwright.plugins import host

MIB = 1 << 20


def three_sizes(number: int, ranks: int, *, local: int, mib: int, large_rows: int = 0) -> SearchSpace:
    """Options and costs of so many tables; ``mib``: of memory on each rank; one more table may have more rows."""
    topology = Topology(ranks, "cpu", ddr_cap=mib * MIB, local_world_size=local)
    tables = [TableSpec(f"t{index}", (9000, 4000, 500)[index % 3], 64, ["f"]) for index in range(number)]
    if large_rows:
        tables.append(TableSpec("large", large_rows, 64, ["f"]))
    options = enumerate_options(tables, topology, Constraints(), host(), batch_size=64)
    create = host().estimators.create
    return estimate_costs(
        options, topology, create("torchrec"), create("weights_and_buffers"), topology.capacity_bytes
    )
