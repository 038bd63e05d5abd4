"""Declared traffic beside counted bytes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from attrs import evolve
from torch import Tensor

from shardwright.planning.arrays import Floats
from shardwright.planning.layouts.layout import Layout
from shardwright.planning.layouts.row_maps import RowMap
from shardwright.planning.options.enumeration import enumerate_options
from shardwright.planning.options.options import Options
from shardwright.planning.options.search_space import filled_bags, traffic_bytes
from shardwright.planning.tables.constraints import Constraints
from shardwright.planning.tables.spec import TableSpec
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.sparse import KeyedJaggedTensor
from shardwright_testing.equality.cases import Case, Table, shard_case, shardings_of
from shardwright_testing.equality.random_cases import Cluster
from shardwright_testing.equality.type_under_test import TypeUnderTest
from shardwright_testing.kernels.keys import keys_of
from shardwright_testing.plugins_under_test import installed
from shardwright_testing.simulated import SimulatedCommunicator, run_simulated

_CANDIDATES = 10_000
"""Keys to choose from: of those, each of a few parts gets as many as it has rows."""


def check_traffic(tested: TypeUnderTest, table: TableSpec, cluster: Cluster, *, is_weighted: bool) -> None:
    """Check each layout: each rank looks every row up twice, in bags of its own; copies look up their rank's."""
    first = _case(tested, table, cluster, is_weighted)
    for index in range(len(tested.layouts(first.specs()[0], cluster, 1))):
        case = evolve(first, tables=[evolve(first.tables[0], variant=index)])
        (layout,) = (sharding.layout for sharding in shardings_of(case, case.specs()).values())
        if _reckons_with_all_rows(layout.row_map):
            _compare(tested, case, cluster, layout)


def _reckons_with_all_rows(row_map: RowMap) -> bool:
    """True if each part that has rows is said to get ids: from none nothing can be reckoned for those looked up."""
    return all(
        row_map.id_fraction_of(part) or not row_map.num_rows_of(part) for part in range(row_map.num_parts)
    )


def _case(tested: TypeUnderTest, table: TableSpec, cluster: Cluster, is_weighted: bool) -> Case:
    other = Table(table.num_embeddings, table.embedding_dim, ("f",), "SUM", tested.name, tested.kernel)
    sizes = (2,) * cluster.world_size
    case = Case([other], sizes, "sgd", is_weighted, local_world_size=cluster.local_world_size)
    return tested.asking(case)


def _compare(tested: TypeUnderTest, case: Case, cluster: Cluster, layout: Layout) -> None:
    ids = _ids(layout.row_map)
    declared = _declared_bytes(tested, case, cluster, layout.variant)
    once, twice = (_sent(case, ids, repetitions) for repetitions in (1, 2))  # lengths are not reckoned with
    counted = {"ids": twice["ids"] - once["ids"], "results": once["results"]}
    for what, said in declared.items():
        assert abs(said - counted[what]) < 0.5, (
            f"{tested.name}: {case.specs()[0].describe()} on {cluster.world_size} ranks, layout {layout.variant!r}: "
            f"the planner reckons with {said:.0f} bytes of {what} a step, ranks sent {counted[what]}"
        )


def _declared_bytes(tested: TypeUnderTest, case: Case, cluster: Cluster, variant: str) -> dict[str, float]:
    (spec,) = case.specs()
    rule = tested.rule(
        compute_kernels=[case.tables[0].kernel],
        min_partition=1,
        pooling_factors=[1.0],
        is_weighted=case.is_weighted,
    )
    with installed(tested.sharding_type) as plugins:
        rules = Constraints({spec.path: rule})
        options = enumerate_options(
            [spec], cluster.topology, rules, plugins, batch_size=2 * spec.num_embeddings
        )
    option = next(o for o in range(options.num_options) if options.layouts[o].variant == variant)
    runs = options.shards_of(option)
    received, sent = (column[runs] for column in traffic_bytes(options, cluster.topology))
    travels = options.count[runs] * ~options.is_copy[runs]
    as_rows_are = _as_rows_are(options)[runs]
    is_filled = filled_bags(options, cluster.topology)[runs] == 1  # else as many bags travel as ids
    results = sent * np.where(is_filled, 1.0, as_rows_are)
    return {"ids": float(received * as_rows_are @ travels), "results": float(results @ travels)}


def _as_rows_are(options: Options) -> Floats:
    """Compute the factor of ids where each row is looked up as often as any other: ``[S]``."""
    given = options.id_fraction > 0
    return np.divide(options.row_fraction, options.id_fraction, where=given, out=np.zeros(len(given)))


def _ids(row_map: RowMap) -> Tensor:
    """Each row once; or as many keys, of which each part gets those that it has rows for."""
    if not row_map.takes_any_id:
        return torch.arange(row_map.num_rows)
    keys = keys_of(_CANDIDATES)
    parts = row_map.part_of(keys)
    chosen = [keys[parts == part][: row_map.num_rows_of(part)] for part in range(row_map.num_parts)]
    return torch.cat(chosen)


def _sent(case: Case, ids: Tensor, repetitions: int) -> Counter[str]:
    """The bytes that all ranks sent in one forward pass, by the label's first word.

    Args:
        case: one table.
        ids: each is looked up in two bags, so that no message is filled up to whole words.
        repetitions: number of times that each id is in each bag.
    """
    module, num_bags = case.module_to_shard(), 2 * len(ids)
    features = KeyedJaggedTensor(
        keys=["f"],
        values=ids.repeat_interleave(repetitions).repeat(2),
        lengths=torch.full((num_bags,), repetitions, dtype=torch.int32),
        weights=torch.ones(repetitions * num_bags) if case.is_weighted else None,
    )

    def look_up(env: ShardingEnv) -> Counter[str]:
        communicator = env.communicator
        assert isinstance(communicator, SimulatedCommunicator)
        sharded = shard_case(case, env, module)
        first = len(communicator.sent_bytes)
        with torch.no_grad():
            sharded(features).values()
        counted: Counter[str] = Counter()
        for label, by_rank in communicator.sent_bytes[first:]:
            # On one host there is nothing to cross: that leg only hands a rank its own sums.
            if not (label.endswith("across hosts") and env.local_world_size == env.world_size):
                counted[label.split()[0]] += sum(by_rank)
        return counted

    by_rank = run_simulated(look_up, case.world_size, local_world_size=case.local_world_size)
    return sum(by_rank, Counter())
