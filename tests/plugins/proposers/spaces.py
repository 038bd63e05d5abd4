"""Options and costs of given tables by built-in plugins, all their plans; and many tables of three sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from shardwright import SearchSpace, TableSpec, Topology
from shardwright.host import host
from shardwright.planning.arrays import FREE, NO_GANG
from shardwright.planning.options.enumeration import enumerate_options
from shardwright.planning.options.rank_rules import RankRules
from shardwright.planning.options.search_space import estimate_costs
from shardwright.planning.search.placement import propose
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


def all_plans(space: SearchSpace) -> Iterator[tuple[Any, Any]]:
    """Shards and ranks of each plan within the memories, on ranks of the right device and host, by trying all."""
    options, devices = space.options, np.array(space.topology.compute_devices)
    for proposal in product(*(options.of_table(table) for table in options.distinct_table.tolist())):
        shards = propose(space, np.array(proposal))
        if (shards.fixed_bytes > shards.capacity_bytes).any():
            continue
        asked = [options.requests[code][1].device for code in options.request[shards.shard].tolist()]
        for ranks in product(range(len(devices)), repeat=len(shards)):
            placed = np.array(ranks, dtype=np.int64)
            fits = (shards.used_bytes(placed) <= shards.capacity_bytes).all()
            if fits and list(devices[placed]) == asked and _keeps_hosts(shards, placed):
                yield shards, placed


def _keeps_hosts(shards: Any, ranks: Any) -> bool:
    """Whether shards of one gang share a host, at the ranks inside it that they must have."""
    hosts, local = np.divmod(ranks, shards.local_world_size)
    together = all(len(set(hosts[shards.gang == gang])) <= 1 for gang in set(shards.gang) - {NO_GANG})
    return together and bool(((shards.local_rank == FREE) | (shards.local_rank == local)).all())


def best_by_trying_all(space: SearchSpace) -> float:
    """The least largest time of :func:`all_plans`; infinite if nothing fits."""
    return min((float(shards.loads_ms(ranks).max()) for shards, ranks in all_plans(space)), default=np.inf)


def three_sizes(number: int, ranks: int, *, local: int, mib: int, large_rows: int = 0) -> SearchSpace:
    """Options and costs of so many tables; ``mib``: of memory on each rank; one more table may have more rows."""
    topology = Topology(ranks, "cpu", ddr_cap=mib * MIB, local_world_size=local)
    tables = [TableSpec(f"t{index}", (9000, 4000, 500)[index % 3], 64, ["f"]) for index in range(number)]
    if large_rows:
        tables.append(TableSpec("large", large_rows, 64, ["f"]))
    return costed(tables, topology)
