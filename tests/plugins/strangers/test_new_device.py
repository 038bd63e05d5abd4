"""A device, and a table in ten variants, that core never heard of: plugins bring them, and tables are planned so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from tests.core.conftest import make_plugin

import shardwright as sw
from shardwright.host import PluginHost, use_host
from shardwright_plugins import estimators, partitioners, proposers, sharding_types

TABLES = [sw.TableSpec(name, 1000, 16, [name]) for name in ("user", "item")]


class AcmeLinks(sw.CommBackend):
    """Sends from the device; planning asks it for nothing but that."""

    name, devices = "acme_links", ("acme",)

    def connect(self, process_group: Any) -> sw.Communicator:
        raise NotImplementedError


class AcmeKernel(sw.ComputeKernel):
    """Float32 rows on the device, two thirds of its memory's bandwidth."""

    name = "acme_rows"

    def supports(self, request: sw.KernelRequest) -> Any:
        return True if request.device == "acme" else f"it runs on 'acme', not on {request.device!r}"

    def memory_bytes(self, request: sw.KernelRequest, num_rows: int) -> Mapping[str, int]:
        return {"device": num_rows * self.row_bytes(request)}

    def bandwidth_fraction(self, request: sw.KernelRequest) -> float:
        return 2 / 3

    def build(self, blocks: Any, *, device: Any) -> Any:
        raise NotImplementedError


def host_with(**offered: type) -> PluginHost:
    """What plans, and no kernels or backends but what a plugin offers by hooks: ``compute_kernels=Kernel``."""
    own = {
        "estimators": estimators,
        "partitioners": partitioners,
        "proposers": proposers,
        "sharding_types": sharding_types,
    }
    hooks = {f"shardwright_{kind}": lambda own=own: [own] for kind, own in offered.items()}
    return PluginHost(entry_points=(), plugins={**own, "acme": make_plugin(hooks)}, environment={})


def test_tables_are_planned_for_the_device_of_a_plugin() -> None:
    with use_host(host_with(comm_backends=AcmeLinks, compute_kernels=AcmeKernel)):
        topology = sw.Topology(2, "acme", hbm_cap=80_000, ddr_cap=1 << 30)
        plan = sw.EmbeddingShardingPlanner(topology, 8, storage_reservation=0.0).plan_tables(TABLES)
        assert sw.ShardingPlan.from_json(plan.to_json()) == plan
        told = [sharding for sharding in plan.plan[""].values()]
        assert {sharding.compute_kernel for sharding in told} == {"acme_rows"}
        assert "rank:0/acme" in str(plan)
        small = sw.Topology(2, "acme", hbm_cap=60_000, ddr_cap=1 << 30)
        with pytest.raises(sw.NoPlanError):
            sw.EmbeddingShardingPlanner(small, 8, storage_reservation=0.0).plan_tables(TABLES)


def test_device_that_no_backend_declares_is_refused_by_name() -> None:
    with use_host(host_with()), pytest.raises(sw.UnknownNameError, match="'acme'"):
        sw.Topology(2, "acme")


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
