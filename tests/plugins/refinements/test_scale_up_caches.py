"""Caches that planners scale up into spare device memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardwright as sw

ROWS, DIM = 4_000_000, 128  # 2 GiB a table
ASKED = 0.05


def statistics(exponent: float) -> sw.EmbeddingOffloadStats:
    """Of a table whose ids are Zipf's: the larger the exponent, the fewer rows have most of the lookups."""
    lookups = np.diff(np.linspace(0, 1, 101) ** (1 / exponent))
    return sw.EmbeddingOffloadStats(0.1, 10_000, tuple((lookups * 1e6).tolist()), ROWS)


def tables(*, has_statistics: bool = True) -> list[sw.TableSpec]:
    return [
        sw.TableSpec(
            name,
            ROWS,
            DIM,
            (name,),
            optimizer=sw.OptimizerSpec("sgd"),
            cache=sw.CacheParams(ASKED, stats=statistics(exponent) if has_statistics else None),
        )
        for name, exponent in (("hot", 8.0), ("even", 1.0))
    ]


def planned(specs: list[sw.TableSpec], hbm_gib: float, **arguments: Any) -> tuple[Any, Any]:
    """The plan and its report; tables are cut over both ranks and kept in the hosts' memory."""
    topology = sw.Topology(
        world_size=2, compute_device="cuda", hbm_cap=int(hbm_gib * 2**30), ddr_cap=64 << 30
    )
    rule = sw.ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused_uvm_caching"])
    planner = sw.EmbeddingShardingPlanner(
        topology, 512, constraints={"*": rule}, storage_reservation=0.0, **arguments
    )
    return planner.plan_tables(specs), planner.report


def load_factors(plan: Any) -> dict[str, float]:
    return {name: entry.layout.extras["cache"]["load_factor"] for name, entry in plan.plan[""].items()}


def value_ms(report: Any) -> float:
    return float(report.result.plan.value_ms)


def test_caches_fill_spare_memory_where_they_save_most() -> None:
    plain, before = planned(tables(), 1.0)
    larger, report = planned(tables(), 1.0, refinements="scale_up_caches")
    assert load_factors(plain) == {"hot": ASKED, "even": ASKED}
    factors = load_factors(larger)
    # 2 GiB of device memory hold half of both tables; the even one gains as much by each row, the hot one little more.
    assert factors["even"] > 0.7
    assert ASKED <= factors["hot"] < 0.3
    assert value_ms(report) < 0.8 * value_ms(before)
    used, capacity = report.result.plan.used_bytes[:, 0], report.space.capacity_bytes[:, 0]
    assert (used <= capacity).all()
    assert (used > 0.9 * capacity).all()


def test_tables_without_statistics_grow_alike_and_to_the_whole_where_there_is_room() -> None:
    half = load_factors(planned(tables(has_statistics=False), 1.0, refinements="scale_up_caches")[0])
    assert half["hot"] == pytest.approx(half["even"], abs=0.1)
    assert 0.3 < half["hot"] < 0.6
    whole = planned(tables(has_statistics=False), 16.0, refinements="scale_up_caches")[0]
    assert load_factors(whole) == {"hot": 1.0, "even": 1.0}
