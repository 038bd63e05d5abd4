"""Planning problems that are known to have a plan: the placement is drawn first, then the tables, then the slack.

Every rank is filled to the brim with shards of tables of mixed sharding types; the tables follow from their shards, and
what each rank may hold is what the fullest holds, and a little more. Legend: W ranks, H hosts, L ranks of each.

python -m tests.plugins.partitioners.planted FIRST LAST [--every N] [--log planted.jsonl]

With a log, each seed's outcome is a line of it, and seeds that it has already are left out: a run that was broken off
goes on where it ended, and several may run side by side, say even seeds and odd ones.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import attrs
import numpy as np

from shardwright.planning.constraints import Constraints, ParameterConstraints
from shardwright.planning.inputs import Request
from shardwright.planning.parts import Choice
from shardwright.planning.preparation import prepare
from shardwright.planning.reservations import FixedPercentageStorageReservation
from shardwright.planning.search import search
from shardwright.planning.tables import TableSpec
from shardwright.planning.topology import Topology
from shardwright.planning.watch import Watch

RANK_BYTES = 40 * (1 << 30)
LEAST_SLACK, MOST_SLACK = 0.001, 0.05
DIMS = (32, 64, 128)
ELSEWHERE = ("data_parallel", "table_row_wise", "table_column_wise", "row_wise", "table_wise", "column_wise")


@attrs.frozen(eq=False)
class Planted:
    """A planning problem with a plan.

    Args:
        space: what is to be searched.
        plan: for each table, its option and the ranks of its shards.
        slack: what is free on the fullest rank, in parts of what it holds.
    """

    space: object
    plan: tuple
    slack: float


@attrs.define
class Plot:
    """Tables and the ranks of their shards, drawn so that all ranks are full in the end."""

    random: np.random.Generator
    hosts: int
    local: int
    room: np.ndarray = attrs.field(init=False)
    tables: list = attrs.field(factory=list)

    def __attrs_post_init__(self):
        self.room = np.full(self.hosts * self.local, float(RANK_BYTES))

    def add(self, kind, ranks, size, *, num_cuts=1, num_parts=1):
        """A table with a shard of about ``size`` bytes on each of ``ranks``."""
        dim = int(self.random.choice([d for d in DIMS if d // num_cuts >= 32] or [32 * num_cuts]))
        rows = max(1, round(size / (4 * dim // num_cuts))) * num_parts
        np.subtract.at(self.room, ranks, rows // num_parts * (dim // num_cuts) * 4)
        spec = TableSpec(f"t{len(self.tables)}", rows, dim, ["f"])
        self.tables.append((spec, kind, dim // num_cuts, tuple(int(rank) for rank in ranks)))

    def spread(self, kind):
        """Rows on all ranks, or copies."""
        ranks = range(len(self.room))
        size = self.random.uniform(0.002, 0.02) * RANK_BYTES
        self.add(kind, ranks, size, num_parts=1 if kind == "data_parallel" else len(ranks))

    def on_host(self, kind):
        """Rows, or two blocks of columns, on a host that has room."""
        host = int(np.argmax(self.room.reshape(self.hosts, -1).min(axis=1)))
        ranks = np.arange(host * self.local, (host + 1) * self.local)
        size = self.random.uniform(0.02, 0.4) * self.room[ranks].min()
        if kind == "table_row_wise":
            self.add(kind, ranks, size, num_parts=self.local)
        else:
            self.add(kind, self.random.choice(ranks, 2, replace=False), size, num_cuts=2)

    def columns(self):
        """Blocks of columns on ranks that have room."""
        num_cuts = int(self.random.choice([2, 4]))
        ranks = np.argsort(-self.room, kind="stable")[: 2 * num_cuts]
        ranks = self.random.permutation(ranks)[:num_cuts]
        if len(ranks) == num_cuts:
            self.add(
                "column_wise",
                ranks,
                self.random.uniform(0.02, 0.4) * self.room[ranks].min(),
                num_cuts=num_cuts,
            )

    def fill(self, num_tables):
        """Whole tables that leave no room, as many as that, one on each rank at least."""
        world_size = len(self.room)
        on = np.append(
            np.arange(world_size), self.random.integers(world_size, size=max(0, num_tables - world_size))
        )
        for rank, count in enumerate(np.bincount(on, minlength=world_size).tolist()):
            cuts = np.sort(self.random.uniform(0.03, 0.97, size=count - 1))
            for size in np.diff([0.0, *cuts, 1.0]) * self.room[rank]:
                self.add("table_wise", [rank], size)


def _drawn(random):
    """Topology and tables."""
    world_size, num_tables = int(random.integers(2, 65)), int(random.integers(10, 201))
    local = max(size for size in (1, 2, 4, 8) if world_size % size == 0 and size <= world_size)
    plot = Plot(random, world_size // local, local)
    some = num_tables * random.uniform(0, 0.15, size=4)
    for kind, count in zip(("row_wise", "data_parallel", "table_row_wise", "column_wise"), some, strict=True):
        for _ in range(int(count)):
            if kind in ("row_wise", "data_parallel"):
                plot.spread(kind)
            elif kind == "column_wise":
                plot.columns()
            elif local > 1:
                plot.on_host(str(random.choice(["table_row_wise", "table_column_wise"])))
    plot.fill(num_tables - len(plot.tables))
    topology = Topology(world_size, "cuda", local_world_size=local, hbm_cap=4 * RANK_BYTES, ddr_cap=0)
    return topology, plot.tables


def planted(seed):
    """A planning problem with a plan, one a seed."""
    random = np.random.default_rng(seed)
    topology, drawn = _drawn(random)
    freedom = float(random.choice([0.0, 0.1, 0.5]))
    rules = {
        spec.name: ParameterConstraints(
            sharding_types=[
                kind,
                *(other for other in ELSEWHERE if other != kind and random.random() < freedom),
            ],
            compute_kernels=["fused"] if kind != "data_parallel" else ["dense", "fused"],
            min_partition=width,
        )
        for spec, kind, width, _ in drawn
    }
    request = Request(topology, Constraints(rules), 1, FixedPercentageStorageReservation(0.0))
    space = prepare([spec for spec, *_ in drawn], request, Choice().resolve())
    plan = tuple(planned(space, table, *entry) for table, entry in enumerate(drawn))
    slack = float(np.exp(random.uniform(np.log(LEAST_SLACK), np.log(MOST_SLACK))))
    capacity = np.ceil(used_bytes(space, plan).max() * (1 + slack))
    room = space.capacity_bytes.copy()
    room[:, space.tiers.index("hbm")] = int(capacity)
    return Planted(attrs.evolve(space, capacity_bytes=room), plan, slack)


def planned(space, table, spec, kind, width, ranks):
    """The option of a table that its shards are of, and their ranks."""
    options = space.options
    for option in options.of_table(int(options.alike[table])):
        runs = options.shards_of(option)
        fits = options.type_of(option).name == kind and options.num_columns[runs.start] == width
        if fits and options.shards_per_option[option] == len(ranks):
            return option, ranks
    raise AssertionError(f"{kind} of {spec} with {len(ranks)} shards is no option")


def used_bytes(space, plan):
    """What each rank holds of each tier: ``[W, M]``."""
    used = np.zeros_like(space.capacity_bytes)
    for option, ranks in plan:
        np.add.at(used, np.array(ranks), space.options.spread(space.memory_bytes, option))
    return used


class _First(Watch):
    """Ends a search at its first plan."""

    def tell(self, *, value_ms=np.inf, lower_bound_ms=0.0):
        """Note what was found."""
        super().tell(value_ms=value_ms, lower_bound_ms=lower_bound_ms)
        self.was_interrupted = self.was_interrupted or bool(np.isfinite(value_ms))


def searched(problem):
    """What the default search finds first."""
    parts = Choice().resolve()
    space = attrs.evolve(problem.space, watch=_First())
    return search(space, parts.proposers, parts.partitioner, last_resorts=parts.last_resorts)


def outcome(seed):
    """Search the problem of a seed; what came of it, and what it took."""
    problem, start = planted(seed), time.process_time()
    result = searched(problem)
    return {
        "seed": seed,
        "ranks": int(problem.space.topology.world_size),
        "tables": len(problem.plan),
        "slack": round(problem.slack, 5),
        "solved": result.proposal is not None,
        "seconds": round(time.process_time() - start, 2),
        "misfit": str(result.misfit or ""),
    }


def _logged(log):
    lines = log.read_text().splitlines() if log is not None and log.exists() else []
    return {entry["seed"]: entry for entry in map(json.loads, lines)}


def main():
    """Search the problems of some seeds; print those without a plan, and what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--every", type=int, default=1, help="only each so many-th seed")
    parser.add_argument("--log", type=Path, help="a file for a line of JSON for each seed")
    asked = parser.parse_args()
    seeds, known = range(asked.first, asked.last, asked.every), _logged(asked.log)
    for seed in seeds:
        if seed in known:
            continue
        known[seed] = outcome(seed)
        if not known[seed]["solved"]:
            print(known[seed], flush=True)
        if asked.log is not None:
            with asked.log.open("a") as log:
                log.write(json.dumps(known[seed]) + "\n")
    mine = [known[seed] for seed in seeds]
    slowest = max(mine, key=lambda entry: entry["seconds"])
    print(
        f"{sum(entry['solved'] for entry in mine)} of {len(mine)} solved in "
        f"{sum(entry['seconds'] for entry in mine):.0f} s; slowest {slowest['seconds']:.1f} s (seed "
        f"{slowest['seed']}); failed: {[entry['seed'] for entry in mine if not entry['solved']]}"
    )


if __name__ == "__main__":
    main()
