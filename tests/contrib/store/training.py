"""A process that trains a table of ten times its cache from a store, and commits; a test kills it.

Usage: python -m tests.contrib.store.training STEPS [MIB]

It goes on from the last commit, if there is one, commits after every third step and writes a line then. With MIB it may
allocate so many MiB beyond what imports took, and the table has ten times as many.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

import shardwright_store
import torch
from tests.plugins.compute_kernels import larger_than_memory

import shardwright as sw
from shardwright.host import PluginHost, use_host

ROWS, DIM, BATCH, IDS, EVERY = 700, 8, 20, 3, 3


SIZES: Any = {"rows": ROWS, "dim": DIM, "held": 0.09}
"""One table with Adam, its cache of a tenth of the rows."""


def model_of(kernel: str = "lmdb_caching", **sizes: Any) -> sw.DistributedModelParallel:
    return larger_than_memory.model_of(kernel, **{**SIZES, **sizes})


def train(model: sw.DistributedModelParallel, step: int, rows: int = ROWS) -> float:
    """One step, whose batch follows from its number: few rows often, all of them sometimes."""
    ids = (torch.rand(BATCH * IDS, generator=torch.Generator().manual_seed(step)) ** 4 * rows).long()
    batch = sw.KeyedJaggedTensor(["f"], ids, lengths=torch.full((BATCH,), IDS))
    loss = (model(batch).values() - 1).square().mean()
    loss.backward()
    return loss.item()


def main(steps: int, mib: int) -> None:
    """Train from the last commit on."""
    rows, dim = (10 * (mib << 20) // (64 * 4), 64) if mib else (ROWS, DIM)
    if mib:
        torch.set_num_threads(1)
        train(model_of(), 0)  # what is imported or started once is there before the limit is set
        limit = larger_than_memory.data_bytes() + (mib << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    model = model_of(rows=rows, dim=dim, held=0.01 if mib else 0.09)
    try:
        first = shardwright_store.restore(model) + 1
    except sw.InvalidInputError:
        first = 0
    for step in range(first, first + steps):
        loss = train(model, step, rows)
        if step % EVERY == EVERY - 1:
            shardwright_store.commit(model, step)
            print(json.dumps({"committed": step, "from": first, "loss": loss}), flush=True)
        else:
            print(json.dumps({"step": step, "from": first, "loss": loss}), flush=True)


if __name__ == "__main__":
    with use_host(PluginHost(plugins={"store": shardwright_store})):
        main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
