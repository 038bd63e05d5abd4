"""A training step of tables of any id beside one of tables of rows, at equal ids; and one in which keys are evicted.

    python -m tests.benchmarks.steps.keyed_rows --tables 8 --rows 100000

One process of one thread, forward and backward pass with fused row-wise Adagrad. Steps of all kinds take turns. Prints
JSON: the least and the median step of each, ms. In `evicting` tables one id in a hundred is new, and each takes a row.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).parents[3] / "contrib" / "hash_embedding"))

import shardwright_hash_embedding
from shardwright_hash_embedding import HashSettings

import shardwright as sw
from shardwright.host import PluginHost, use_host

BATCHES = 4
KINDS = ("rows", "keys", "evicting")


def model_of(kind: str, tables: int, rows: int, dim: int, batch: int) -> Any:
    """A sharded collection in this process."""
    configs = [
        sw.EmbeddingBagConfig(name=f"t{i}", num_embeddings=rows, embedding_dim=dim, feature_names=[f"f{i}"])
        for i in range(tables)
    ]
    sharders = [sw.EmbeddingBagCollectionSharder({"optimizer": "row_wise_adagrad", "learning_rate": 0.02})]
    rule = (
        sw.ParameterConstraints(sharding_types=["row_wise"])
        if kind == "rows"
        else HashSettings().constraints()
    )
    topology = sw.Topology(world_size=1, compute_device="cpu")
    planner = sw.EmbeddingShardingPlanner(topology, batch, constraints={"*": rule})
    module = sw.EmbeddingBagCollection(configs, device="meta")
    plan = planner.plan(module, sharders)
    return sw.DistributedModelParallel(module, env=sw.ShardingEnv.local(), plan=plan, sharders=sharders)


class Ids:
    """Batches of one kind: even over the rows, some of them new."""

    def __init__(self, kind: str, tables: int, rows: int, batch: int, ids: int) -> None:
        self.shape, self.rows, self.new = (tables, batch, ids), rows, rows
        self.part = 0.01 if kind == "evicting" else 0.0
        self.generator = torch.Generator().manual_seed(0)

    def every(self) -> sw.KeyedJaggedTensor:
        """Every row of every table, so that each key has one."""
        values = torch.arange(self.rows).expand(self.shape[0], 1, self.rows)
        return self._of(values)

    def draw(self) -> sw.KeyedJaggedTensor:
        """A batch."""
        values = torch.randint(0, self.rows, self.shape, generator=self.generator)
        is_new = torch.rand(self.shape, generator=self.generator) < self.part
        values[is_new] = torch.arange(self.new, self.new + int(is_new.sum()))
        self.new += int(is_new.sum())
        return self._of(values)

    def _of(self, values: torch.Tensor) -> sw.KeyedJaggedTensor:
        tables, batch, ids = values.shape
        lengths = torch.full((tables * batch,), ids, dtype=torch.int32)
        return sw.KeyedJaggedTensor([f"f{i}" for i in range(tables)], values.reshape(-1), lengths=lengths)


def main(
    tables: Annotated[int, typer.Option(min=1, help="Equal tables, one feature each.")] = 8,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a table.")] = 100_000,
    dim: Annotated[int, typer.Option(min=1, help="Columns of a table.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Samples.")] = 1024,
    ids: Annotated[int, typer.Option(min=1, help="Ids of a bag.")] = 10,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each kind.")] = 20,
) -> None:
    """Time the steps."""
    torch.set_num_threads(1)
    with use_host(PluginHost(plugins={"hash_embedding": shardwright_hash_embedding})):
        models = {kind: model_of(kind, tables, rows, dim, batch) for kind in KINDS}
        batches = {kind: Ids(kind, tables, rows, batch, ids) for kind in KINDS}
        for kind, model in models.items():
            model(batches[kind].every()).values().sum().backward()
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(BATCHES + steps):
            for kind, model in models.items():
                features = batches[kind].draw()
                start = time.perf_counter()
                values = model(features).values()
                values.backward(torch.ones_like(values))
                seconds[kind].append(time.perf_counter() - start)
    timed = {kind: sorted(own[BATCHES:]) for kind, own in seconds.items()}
    figures = {
        kind: {"min_ms": round(1e3 * own[0], 3), "median_ms": round(1e3 * own[len(own) // 2], 3)}
        for kind, own in timed.items()
    }
    typer.echo(json.dumps(figures))


if __name__ == "__main__":
    typer.run(main)
