"""Options and costs of given tables by built-in plugins; and tables of three sizes, each many times, to count."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright import SearchSpace, TableSpec, Topology
from shardwright.host import host
from shardwright.planning.options.enumeration import enumerate_options
from shardwright.planning.options.rank_rules import RankRules
from shardwright.planning.options.search_space import estimate_costs
from shardwright.planning.tables.constraints import Constraints

MIB = 1 << 20


def costed(
    tables: Sequence[TableSpec],
    topology: Topology,
    *,
    constraints: Constraints | None = None,
    rules: RankRules | None = None,
    estimators: tuple[str, str] = ("torchrec", "weights_and_buffers"),
    batch_size: int = 64,
) -> SearchSpace:
    """Options and costs of tables on ranks without reservations; ``estimators``: of time, and of memory."""
    asked = constraints or Constraints()
    options = enumerate_options(tables, topology, asked, host(), batch_size=batch_size, rules=rules)
    performance, storage = (host().estimators.create(name) for name in estimators)
    return estimate_costs(options, topology, performance, storage, topology.capacity_bytes)


def three_sizes(number: int, ranks: int, *, local: int, mib: int, large_rows: int = 0) -> SearchSpace:
    """Options and costs of so many tables; ``mib``: of memory on each rank; one more table may have more rows."""
    topology = Topology(ranks, "cpu", ddr_cap=mib * MIB, local_world_size=local)
    tables = [TableSpec(f"t{index}", (9000, 4000, 500)[index % 3], 64, ["f"]) for index in range(number)]
    if large_rows:
        tables.append(TableSpec("large", large_rows, 64, ["f"]))
    return costed(tables, topology)
