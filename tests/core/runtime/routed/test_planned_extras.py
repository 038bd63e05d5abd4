"""What a kernel put into the plan comes back to it when the plan is run."""

from __future__ import annotations

from tests.core.runtime.plans import Loop, paths_here

from shardwright import Block, Collection, Layout, ParameterSharding, TableSpec, hookimpl
from shardwright.host import PluginHost, use_host
from shardwright.runtime.routed.plan import plan_routing


class Remembering(Loop):
    """A kernel whose blocks are grouped by what the plan says of them."""

    name, aliases = "remembering", ()

    def group_key(self, request):
        return request.extras["held"]


class Kernels:
    @hookimpl
    def shardwright_compute_kernels(self):
        return [Remembering]


def test_groups_ask_kernels_for_what_the_plan_says():
    tables = [TableSpec(f"t{index}", 10, 4, [f"f{index}"]) for index in range(3)]
    with use_host(PluginHost(entry_points=(), plugins={"kernels": Kernels()}, environment={})):
        shardings = {}
        for table, held in zip(tables, (0.5, 0.25, 0.5), strict=True):
            layout = Layout([Block(table.all_rows, table.all_columns, rank=0)], extras={"held": held})
            shardings[table.name] = ParameterSharding("whole", "remembering", layout)
        groups = plan_routing(
            Collection.of(tables),
            range(3),
            shardings,
            rank=0,
            world_size=1,
            device_type="cpu",
            path_of=paths_here(is_pooled=True),
        ).groups
    found = [[spec.request.extras["held"] for spec in group.blocks] for group in groups]
    assert found == [[0.5, 0.5], [0.25]]
