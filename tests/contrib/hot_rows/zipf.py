"""What a training step sends with hot_rows and with row_wise, counted, on ids that follow Zipf's law.

`python -m tests.contrib.hot_rows.zipf` prints the table of contrib/hot_rows/README.md.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import frozen

import shardwright as sw
from shardwright.host import PluginHost, use_host
from shardwright_testing import SimulatedCommunicator, run_simulated

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3] / "contrib" / "hot_rows"))

import shardwright_hot_rows
from shardwright_hot_rows import AccessCounts, HotRows

ROWS, DIM, WORLD_SIZE = 20_000, 64, 4


@frozen
class Traffic:
    """What a step of all ranks sends to other ranks: bytes by the first word of the label."""

    bytes_of: Counter[str]

    @property
    def total(self) -> int:
        return sum(self.bytes_of.values())


def zipf_ids(count: int, seed: int, *, num_rows: int = ROWS, exponent: float = 1.0) -> torch.Tensor:
    """Ids whose ranks in frequency follow Zipf's law; which row has which rank is drawn once."""
    weights = np.arange(1.0, num_rows + 1) ** -exponent
    drawn = np.random.default_rng(seed).choice(num_rows, size=count, p=weights / weights.sum())
    return torch.from_numpy(np.random.default_rng(7).permutation(num_rows)[drawn])


def measured_counts(batches: int = 50, *, num_rows: int = ROWS, exponent: float = 1.0) -> AccessCounts:
    """From batches of another time than those that are trained on."""
    seeds = range(1000, 1000 + batches)
    ids = [zipf_ids(10_000, seed, num_rows=num_rows, exponent=exponent) for seed in seeds]
    return AccessCounts.measured(ids, num_rows)


def layouts(pooling: str, counts: AccessCounts) -> dict[str, sw.ParameterSharding]:
    """row_wise, and hot_rows with each number of hot rows: by type and share of the lookups."""
    table = sw.TableSpec("item", ROWS, DIM, ["item"], pooling=pooling)
    topology = sw.Topology(world_size=WORLD_SIZE, compute_device="cpu")
    rule = sw.ParameterConstraints(extras=counts.to_extras())
    rows = sw.RowsRange(ROWS, parts=WORLD_SIZE)
    found = {"row_wise": sw.Layout([sw.BlockRun(rows, table.all_columns, WORLD_SIZE, rank=0)])}
    found.update((layout.variant, layout) for layout in HotRows().layouts(table, topology, rule))
    return {
        name: sw.ParameterSharding(
            "row_wise" if name == "row_wise" else "hot_rows",
            "fused_torch",
            layout.placed([block.rank or 0 for block in layout.blocks]),
        )
        for name, layout in found.items()
    }


def step_traffic(
    pooling: str,
    sharding: sw.ParameterSharding,
    *,
    batch_size: int,
    ids_per_bag: int,
    exponent: float = 1.0,
) -> Traffic:
    """The bytes of one training step."""
    common: dict[str, Any] = {"name": "item", "num_embeddings": ROWS, "embedding_dim": DIM}
    params = {"optimizer": "row_wise_adagrad", "learning_rate": 0.05}
    if pooling == "NONE":
        sharder: Any = sw.EmbeddingCollectionSharder(fused_params=params)
        module: Any = sw.EmbeddingCollection([sw.EmbeddingConfig(feature_names=["item"], **common)])
    else:
        sharder = sw.EmbeddingBagCollectionSharder(fused_params=params)
        config = sw.EmbeddingBagConfig(feature_names=["item"], pooling=pooling, **common)
        module = sw.EmbeddingBagCollection([config])

    def train(env: sw.ShardingEnv) -> Counter[str]:
        communicator = env.communicator
        assert isinstance(communicator, SimulatedCommunicator)
        sharded = sharder.shard(module, {"item": sharding}, env, "cpu")
        features = sw.KeyedJaggedTensor(
            keys=["item"],
            values=zipf_ids(batch_size * ids_per_bag, env.rank, exponent=exponent),
            lengths=torch.full((batch_size,), ids_per_bag, dtype=torch.int32),
        )
        first = len(communicator.sent_bytes)
        result = sharded(features)
        values = result["item"].values() if pooling == "NONE" else result.values()
        values.sum().backward()
        return _to_others(communicator.sent_bytes[first:], env.rank)

    return Traffic(sum(run_simulated(train, WORLD_SIZE), Counter()))


def _to_others(sent: Sequence[tuple[str, Sequence[int]]], rank: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for label, by_rank in sent:
        found[label.split()[0]] += sum(by_rank) - by_rank[rank]
    return found


CASES = (("NONE", 512, 20), ("SUM", 512, 20), ("SUM", 512, 100))
"""Pooling, samples of a rank, ids of a sample."""

EXPONENTS = (1.0, 1.2, 1.5)


def main() -> None:
    torch.set_num_threads(1)
    for exponent in EXPONENTS:
        counts = measured_counts(exponent=exponent)
        with use_host(PluginHost(plugins={"hot_rows": shardwright_hot_rows})):
            for case in CASES:
                _print_case(counts, exponent, *case)


def _print_case(
    counts: AccessCounts, exponent: float, pooling: str, batch_size: int, ids_per_bag: int
) -> None:
    print(f"{pooling}, {WORLD_SIZE} ranks, {batch_size} x {ids_per_bag} ids, exponent {exponent}: kB a step")
    base = 0
    for name, sharding in layouts(pooling, counts).items():
        traffic = step_traffic(
            pooling, sharding, batch_size=batch_size, ids_per_bag=ids_per_bag, exponent=exponent
        )
        base = base or traffic.total
        parts = ", ".join(f"{label} {size / 1e3:.0f}" for label, size in traffic.bytes_of.items())
        print(f"  {name:<36} {traffic.total / 1e3:8.0f}  {1 - traffic.total / base:5.0%} saved  ({parts})")


if __name__ == "__main__":
    main()
