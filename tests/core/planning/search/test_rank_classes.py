"""Ranks of unlike speed: what shards cost on each, in options, plans, proofs and reports."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import strategies as st
from tests.core.planning.conftest import Cells, FirstFit, Plain, Slices, Weights, Whole, make_host
from tests.drawn import drawn

from shardwright.errors import PlanError
from shardwright.host import host, use_host
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.enumeration import enumerate_options
from shardwright.planning.options.search_space import estimate_costs
from shardwright.planning.options.shapes import group_of
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.planner import TablePlanner
from shardwright.planning.proofs import why_unproven
from shardwright.planning.search.loaded import LoadedPlan
from shardwright.planning.search.placement import propose
from shardwright.planning.tables.constraints import Constraints, ParameterConstraints
from shardwright.planning.tables.spec import TableSpec
from shardwright_plugins.plan_differences.check import check_plan

MIB = 1 << 20
SPEEDS = st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=3, max_size=3)


class Travelling(Cells):
    """Cells looked up at the ranks' speed, and columns that travel, on any rank alike."""

    name = "travelling"

    def estimate(self, options, topology):
        lookup = super().estimate(options, topology)["forward"] / topology.speed
        return {"lookup": lookup, "travel": 0.02 * options.num_columns}


OFFERED = {
    "sharding_types": [Whole, Slices],
    "compute_kernels": [Plain],
    "estimators": [Travelling, Weights],
}


def space_of(rows, speeds, estimator="travelling"):
    tables = [TableSpec(f"t{i}", count, 4, ["f"]) for i, count in enumerate(rows)]
    topology = Topology(len(speeds), "cpu", ddr_cap=MIB, speed=speeds)
    with use_host(make_host(**{**OFFERED, "estimators": [Travelling, Cells, Weights]})):
        options = enumerate_options(tables, topology, Constraints(), host(), batch_size=4)
        make = host().estimators.create
        return estimate_costs(options, topology, make(estimator), make("weights"), topology.capacity_bytes)


def plans_of(space):
    """Each plan with the time of each of its ranks, added up from what a shard's rows and columns take there."""
    options, speeds = space.options, space.topology.speeds
    for proposal in product(*(options.of_table(table) for table in options.distinct_table.tolist())):
        free = len(propose(space, np.array(proposal)))
        for placed in product(range(len(speeds)), repeat=free):
            plan = LoadedPlan(space, np.array(proposal), np.array(placed, dtype=np.int64))
            times = np.zeros(len(speeds))
            for table, (option, ranks) in enumerate(zip(proposal, plan.ranks_of_tables, strict=True)):
                ids = options.ids_per_batch[options.distinct_table[table]]
                for block, rank in zip(options.layouts[option].blocks, ranks, strict=True):
                    lookup = ids * block.num_rows * len(block.columns) / 1000
                    times[rank] += lookup / speeds[rank] + 0.02 * len(block.columns)
            yield plan, times


@drawn(rows=st.lists(st.integers(3, 40), min_size=1, max_size=2), speeds=SPEEDS, quick=10, thorough=80)
def test_plan_takes_on_each_rank_what_its_shards_take_there(rows, speeds):
    for plan, times in plans_of(space_of(rows, speeds)):
        assert plan.load_ms == pytest.approx(times)
        assert plan.value_ms == pytest.approx(times.max())
        assert plan.shards.loads_ms(plan.ranks) == pytest.approx(times)
        assert plan.table_ms.sum() == pytest.approx(times.sum())


@drawn(
    rows=st.lists(st.integers(3, 40), min_size=1, max_size=2),
    speeds=SPEEDS,
    weights=st.lists(st.sampled_from([0.2, 0.5, 1.0, 1.3, 4.0]), min_size=3, max_size=3),
    price=st.sampled_from([0.0, 1e-4, 1e-2]),
    quick=15,
    thorough=200,
)
def test_no_weights_of_classes_prove_a_bound_above_the_best_plan(rows, speeds, weights, price):
    space = space_of(rows, speeds)
    best = min(float(times.max()) for _, times in plans_of(space))
    own = weights[: len(space.topology.classes)]
    for part in (1.0 + 1e-6, 1.001, 1.1, 2.0):
        certificate = {"z_ms": best * part, "multipliers": {"ddr": price}, "weights": own}
        assert why_unproven(space, best * part, certificate, host().extensions)


def test_weights_of_classes_prove_what_no_others_prove():
    space = space_of([40] * 6, [1.0, 1.0, 0.5])
    # Six whole tables on ranks of speeds that are 2.5 together; what travels is less on all.
    bound = 0.97 * space.topology.speeds[0] * 6 * float(space.phases["lookup"][:, 0].max()) / 2.5

    def reason(**weights):
        certificate = {"z_ms": bound, "multipliers": {}, **weights}
        return why_unproven(space, bound, certificate, host().extensions)

    assert reason(weights=[1.2, 0.6]) == ""
    assert reason()
    # Sums of the last but one are infinite on both sides, of the last they are 0: neither proves anything.
    for wrong in ([1.0, 0.0], [1.0, float("inf")], [1.0, 1.0, 1.0], "ab", [1e308, 1e308], [5e-324, 5e-324]):
        with pytest.raises(PlanError, match="malformed"):
            reason(weights=wrong)


def test_partitioner_that_knows_no_speed_gives_a_plan_whose_times_are_right():
    tables = [TableSpec(f"t{i}", 20 + i, 4, ["f"]) for i in range(4)]
    planner = TablePlanner(
        Topology(2, "cpu", ddr_cap=MIB, speed=[0.5, 1.0]),
        4,
        constraints={"*": ParameterConstraints(sharding_types=["whole"])},
        storage_reservation=0.0,
    )
    with use_host(make_host(**OFFERED, partitioners=[FirstFit])):
        plan = planner.plan_tables(tables)
        again = ShardingPlan.from_json(plan.to_json())
        found = check_plan(again)
    # All on the first rank, which is half as fast: 4 samples, an id and 4 columns each.
    expected = sum(4 * (20 + i) * 4 / 1000 / 0.5 + 0.08 for i in range(4))
    assert plan.document["objective"]["value_ms"] == pytest.approx(expected)
    assert (found.problems, found.value_ms) == ([], pytest.approx(expected))
    report = planner.report
    assert report.ranks[0]["time_ms"] == pytest.approx(expected)
    assert report.ranks[0]["types"]["whole"]["time_ms"] == pytest.approx(expected)
    assert sum(table["time_ms"] for table in report.tables) == pytest.approx(expected)
    header = next(line for line in str(report).splitlines() if line.lstrip().startswith("rank"))
    assert header.replace("|", " ").split()[:2] == ["rank", "speed"]


def test_mixed_devices_have_speeds_of_their_own():
    topology = Topology(4, ["cuda", "cuda", "cpu", "cpu"], speed=[1.0, 1.0, 1.0, 0.5])
    assert group_of(topology, "cpu").speeds == (1.0, 0.5)
    assert group_of(topology, "cuda").speeds == (1.0, 1.0)
