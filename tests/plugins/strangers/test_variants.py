"""A table in ten variants, each with another part of its rows in the device's memory: a type and a kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from tests.plugins.strangers.test_new_device import AcmeLinks, host_with

import shardwright as sw
from shardwright.host import use_host

ROWS, DIM = 100_000, 16
TABLE_BYTES = ROWS * DIM * 4
TENTHS = range(1, 11)


class Tenths(sw.ShardingType):
    """Whole tables on any rank, with one to ten tenths of the rows in the device's memory."""

    name, abbreviation = "acme_tenths", "AT"

    def layouts(self, table: sw.TableSpec, topology: Any, constraints: Any) -> Iterator[sw.Layout]:
        for tenths in TENTHS:
            block = sw.Block(table.all_rows, table.all_columns)
            yield sw.Layout([block], variant=f"{tenths} tenths", extras={"acme_tenths": tenths})


class Halfway(sw.ComputeKernel):
    """Rows in two memories, as the layout says."""

    name = "acme_halfway"

    def supports(self, request: sw.KernelRequest) -> Any:
        return (
            True if "acme_tenths" in request.extras else "its tables have a part of their rows on the device"
        )

    def memory_bytes(self, request: sw.KernelRequest, num_rows: int) -> Mapping[str, int]:
        near = num_rows * request.extras["acme_tenths"] // 10
        return {"device": near * self.row_bytes(request), "host": (num_rows - near) * self.row_bytes(request)}

    def reads(self, request: sw.KernelRequest) -> Mapping[str, float]:
        near = request.extras["acme_tenths"] / 10
        return {"device": near, "host": 1 - near} if near < 1 else {"device": 1.0}

    def build(self, blocks: Any, *, device: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(("device_part", "tenths"), [(2.0, 10), (0.75, 7), (0.35, 3)])
def test_variant_that_fits_both_memories_and_takes_least_time_is_planned(
    device_part: float, tenths: int
) -> None:
    with use_host(host_with(comm_backends=AcmeLinks, sharding_types=Tenths, compute_kernels=Halfway)):
        topology = sw.Topology(1, "acme", hbm_cap=int(device_part * TABLE_BYTES), ddr_cap=2 * TABLE_BYTES)
        rule = sw.ParameterConstraints(sharding_types=["acme_tenths"], pooling_factors=[10.0])
        planner = sw.EmbeddingShardingPlanner(
            topology, 8, constraints={"*": rule}, estimator="roofline", storage_reservation=0.0
        )
        plan = planner.plan_tables([sw.TableSpec("item", ROWS, DIM, ["item"])])
        layout = plan.plan[""]["item"].layout
        assert (layout.variant, layout.extras["acme_tenths"]) == (f"{tenths} tenths", tenths)
        assert sw.ShardingPlan.from_json(plan.to_json()) == plan
