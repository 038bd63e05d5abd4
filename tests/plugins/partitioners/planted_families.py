"""Planning problems that are known to have a plan, of other kinds than those of :mod:`.planted`: one family each.

python -m tests.plugins.partitioners.planted_families FAMILY FIRST LAST

Legend: W ranks, H hosts, L ranks of each.
"""

from __future__ import annotations

import sys
import time

import attrs
import numpy as np
from tests.plugins.partitioners.planted import RANK_BYTES, Planted, Plot, planned, searched, used_bytes

from shardwright.planning.constraints import Constraints, ParameterConstraints
from shardwright.planning.inputs import Request
from shardwright.planning.parts import Choice
from shardwright.planning.preparation import prepare
from shardwright.planning.reservations import FixedPercentageStorageReservation
from shardwright.planning.topology import Topology

WHOLE = "table_wise"


def _equal(random, plot):
    """Every rank is full of tables of one of a few sizes, so many of them that no other number fits."""
    for rank in range(len(plot.room)):
        number = int(random.choice([1, 2, 3, 4, 5]))
        for _ in range(number):
            plot.add(WHOLE, [rank], RANK_BYTES / number)


def _triplets(random, plot):
    """Three tables on each rank, none as large as half of it (the hard instances of Falkenauer 1996)."""
    for rank in range(len(plot.room)):
        first = random.uniform(0.38, 0.49)
        second = random.uniform(0.26, first)
        for part in (first, second, 1 - first - second):
            plot.add(WHOLE, [rank], part * RANK_BYTES)


def _big_and_small(random, plot):
    """A large table on each rank, and small ones of very uneven sizes."""
    for rank in range(len(plot.room)):
        large = random.uniform(0.6, 0.95)
        plot.add(WHOLE, [rank], large * RANK_BYTES)
        parts = random.lognormal(0, 1.5, size=int(random.integers(1, 5)))
        for part in parts / parts.sum() * (1 - large):
            plot.add(WHOLE, [rank], part * RANK_BYTES)


def _hosts(random, plot):
    """Rows over every host several times, two blocks of columns on hosts, and whole tables for the rest."""
    for host in range(plot.hosts):
        ranks = np.arange(host * plot.local, (host + 1) * plot.local)
        for _ in range(int(random.integers(1, 4))):
            size = random.uniform(0.02, 0.3) * plot.room[ranks].min()
            plot.add("table_row_wise", ranks, size, num_parts=plot.local)
        pair = random.choice(ranks, 2, replace=False)
        plot.add("table_column_wise", pair, random.uniform(0.05, 0.5) * plot.room[pair].min(), num_cuts=2)
    plot.fill(int(2.2 * len(plot.room)))


def _cuts(random, plot):
    """Nothing but blocks of columns, two or four of a table, and small whole tables that fill up."""
    for _ in range(int(1.5 * len(plot.room))):
        plot.columns()
    plot.fill(len(plot.room))


def _rows(random, plot):
    """A third of each rank is rows and copies."""
    for _ in range(int(random.integers(10, 30))):
        plot.spread(str(random.choice(["row_wise", "data_parallel"])))
    plot.fill(int(2.5 * len(plot.room)))


FAMILIES = {
    "equal": _equal,
    "triplets": _triplets,
    "big_and_small": _big_and_small,
    "hosts": _hosts,
    "cuts": _cuts,
    "rows": _rows,
    "two_tiers": _triplets,
}


def _plotted(family, random):
    """Tables in HBM, and in host memory where the family has two tiers: each with its kernel."""
    local = int(random.choice([2, 4, 8]))
    hosts = int(random.integers(1, max(2, 48 // local)))
    plots = []
    for kernel in ("fused", "fused_uvm") if family == "two_tiers" else ("fused",):
        plot = Plot(random, hosts, local, [] if not plots else plots[0][0].tables)
        first = len(plot.tables)
        FAMILIES[family](random, plot)
        plots.append((plot, [kernel] * (len(plot.tables) - first)))
    return hosts, local, plots[0][0].tables, [kernel for _, kernels in plots for kernel in kernels]


def family_planted(family, seed):
    """A planning problem of a family that has a plan, one a seed."""
    random = np.random.default_rng(seed)
    hosts, local, drawn, kernels = _plotted(family, random)
    freedom = float(random.choice([0.0, 0.3]))
    rules = {
        spec.name: ParameterConstraints(
            sharding_types=[
                kind,
                *(other for other in (WHOLE, "column_wise") if random.random() < freedom and other != kind),
            ],
            compute_kernels=[kernel] if kind != "data_parallel" else ["dense", "fused"],
            min_partition=width,
        )
        for (spec, kind, width, _), kernel in zip(drawn, kernels, strict=True)
    }
    has_two = len(set(kernels)) > 1
    topology = Topology(
        hosts * local,
        "cuda",
        local_world_size=local,
        hbm_cap=4 * RANK_BYTES,
        ddr_cap=4 * RANK_BYTES * has_two,
    )
    request = Request(topology, Constraints(rules), 1, FixedPercentageStorageReservation(0.0))
    space = prepare([spec for spec, *_ in drawn], request, Choice().resolve())
    plan = tuple(planned(space, table, *entry) for table, entry in enumerate(drawn))
    slack = float(np.exp(random.uniform(np.log(0.001), np.log(0.05))))
    room = space.capacity_bytes.copy()
    for tier in range(1 + has_two):
        room[:, tier] = int(np.ceil(used_bytes(space, plan)[:, tier].max() * (1 + slack)))
    return Planted(attrs.evolve(space, capacity_bytes=room), plan, slack)


def main():
    """Search the problems of some seeds of a family; print what it took."""
    family, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    for seed in range(first, last):
        problem, start = family_planted(family, seed), time.process_time()
        result = searched(problem)
        print(
            f"{family} {seed}: {len(problem.plan)} tables, {problem.space.topology.world_size} ranks, slack "
            f"{problem.slack:.4f}: {'solved' if result.proposal is not None else 'FAILED'} in "
            f"{time.process_time() - start:.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
