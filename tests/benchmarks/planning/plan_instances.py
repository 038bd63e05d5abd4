"""Planning problems to measure a search on: the tables of real models, and tables drawn by chance.

An instance is some tables on hosts x ranks, with so many times the memory that each rank needs at least
(``least_bytes``): from ample (4.0) to hardly enough (1.03). The drawn ones are there because a search that is tuned
on the files gets better at the files: nothing may be tuned on them, and a stage of the search that helps none of them
is of no use to anybody.

The families of drawn tables:

- ``few``: 4 to 14 tables that have nothing in common, some of them too large for a rank;
- ``unlike``: 30 to 120 such tables;
- ``many``: 200 to 800 such tables;
- ``alike``: 300 to 1500 tables of 6 to 30 kinds.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from attrs import frozen

from shardwright import ParameterConstraints, Proposer, SearchSpace, TableSpec, Topology, Workload
from shardwright.host import host
from shardwright.planning.options.enumeration import prepare
from shardwright.planning.options.inputs import Request
from shardwright.planning.options.planning_plugins import PluginChoice
from shardwright.planning.tables.constraints import Constraints

FAMILIES = ("few", "unlike", "many", "alike")
SHAPES = ("1x1", "1x4", "1x8", "2x8", "4x8", "16x8", "64x8")
TIGHTNESS = (4.0, 1.3, 1.1, 1.03)
_NUM_TABLES = {"few": (4, 14), "unlike": (30, 120), "many": (200, 800), "alike": (300, 1500)}
_NUM_KINDS = (6, 30)
_GIB = 1 << 30
# Enough that nothing is short where options are counted; each instance gets its own.
_AMPLE_BYTES = 100_000 * _GIB


@frozen(eq=False)
class Problem:
    """Tables over ranks, before it is said how much memory there is.

    Args:
        name: of the tables.
        shape: hosts x ranks of a host, ``"2x8"``.
        tables: what is to be sharded.
        constraints: how the tables are used.
        batch_size: samples per rank and step.
        estimator: ``"torchrec"`` for TorchRec's models of time and memory and its options; else the preferred ones.
        ddr_gib: host memory of each rank.
    """

    name: str
    shape: str
    tables: Sequence[TableSpec]
    constraints: Constraints
    batch_size: int
    estimator: str | None = None
    ddr_gib: int = 128

    def space(self) -> SearchSpace:
        """The options and their costs, with more device memory than anything needs."""
        hosts, local = (int(part) for part in self.shape.split("x"))
        topology = Topology(
            hosts * local,
            "cuda",
            local_world_size=local,
            hbm_cap=_AMPLE_BYTES,
            ddr_cap=self.ddr_gib * _GIB,
        )
        request = Request(topology, self.constraints, self.batch_size, None)
        return prepare(self.tables, request, self.choice().resolve(host()))

    def choice(self, proposer: Proposer | None = None) -> PluginChoice:
        """The models of costs, and who searches; the preferred proposer by default."""
        if self.estimator is None:
            return PluginChoice(proposer=proposer)
        return PluginChoice(f"{self.estimator}:published_options=true", f"{self.estimator}_storage", proposer)


def of_files(
    folder: Path, shapes: Iterable[str], batch_size: int = 8192, only: Sequence[str] | None = None
) -> Iterator[Problem]:
    """The problems of a folder of workload files under TorchRec's cost model, the smallest first."""
    workloads = [
        attrs.evolve(Workload.read(path), name=path.stem)
        for path in sorted(folder.glob("*.json"))
        if (not only or path.stem in only) and "tables" in json.loads(path.read_text())
    ]
    for shape in shapes:
        for workload in sorted(workloads, key=lambda each: len(each.tables)):
            constraints = workload.constrained(Constraints(None))
            yield Problem(workload.name, shape, workload.tables, constraints, batch_size, "torchrec")


def drawn(
    families: Iterable[str] = FAMILIES, shapes: Iterable[str] = SHAPES, seed: int = 0
) -> Iterator[Problem]:
    """The problems drawn by a generator, one for each family and shape; half of them under TorchRec's cost model."""
    for family in families:
        for shape in shapes:
            random = np.random.default_rng([seed, zlib.crc32(f"{family} {shape}".encode())])
            tables = _tables(family, random)
            constraints = {table.path: use for table, use in tables}
            yield Problem(
                family,
                shape,
                [table for table, _ in tables],
                Constraints(constraints),
                batch_size=int(2 ** random.integers(9, 16)),
                estimator=random.choice(["torchrec", None]),
            )


def _tables(family: str, random: np.random.Generator) -> list[tuple[TableSpec, ParameterConstraints]]:
    number = int(random.integers(*_NUM_TABLES[family]))
    kinds = [
        _table(random) for _ in range(int(random.integers(*_NUM_KINDS)) if family == "alike" else number)
    ]
    # Some kinds are common, and others rare.
    weights = random.lognormal(sigma=1.0, size=len(kinds))
    chosen = (
        random.choice(len(kinds), size=number, p=weights / weights.sum())
        if family == "alike"
        else range(number)
    )
    tables = []
    for index, kind in enumerate(chosen):
        fields, use = kinds[kind]
        tables.append((TableSpec(name=f"t{index}", feature_names=(f"f{index}",), **fields), use))
    return tables


def _table(random: np.random.Generator) -> tuple[dict[str, Any], ParameterConstraints]:
    """A table: 100 to 300 million rows, most of them small; an id a sample, or a list of ids."""
    fields = {
        "num_embeddings": int(10 ** random.triangular(2.0, 4.0, 8.5)),
        "embedding_dim": int(random.choice([8, 16, 32, 48, 64, 96, 128, 256])),
        "data_type": str(random.choice(["FP32", "FP32", "FP16"])),
    }
    pooling = 1.0 if random.random() < 0.5 else round(float(random.lognormal(2.5, 1.0)), 1) + 1
    return fields, ParameterConstraints(pooling_factors=[pooling])


def with_memory(space: SearchSpace, tightness: float) -> SearchSpace:
    """A problem where each rank has so many times what it needs at least."""
    capacity = space.capacity_bytes.copy()
    capacity[:, 0] = int(least_bytes(space) * tightness)
    return attrs.evolve(space, capacity_bytes=capacity)


def least_bytes(space: SearchSpace) -> float:
    """Device memory that each rank needs at least, by options that use no other memory and are no copies.

    That is an even share of what all tables take at least, or the largest shard of the table that is hardest to cut.
    """
    options, first = space.options, space.options.first_option[:-1]
    alone = (space.total_bytes[:, 1:] == 0).all(axis=1) & ~options.is_replicated
    total = np.where(alone, space.total_bytes[:, 0], np.iinfo(np.int64).max // 4096)
    largest = np.where(alone, space.largest_bytes[:, 0], np.iinfo(np.int64).max // 4096)
    share = float(np.minimum.reduceat(total, first) @ options.multiplicity) / space.topology.world_size
    return max(share, float(np.minimum.reduceat(largest, first).max()))
