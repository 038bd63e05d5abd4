"""A sharding type under test, and what a user asks for beside its name."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from attrs import evolve, frozen

from shardwright.contracts import ShardingType
from shardwright.contracts.compute_kernel import KernelRequest
from shardwright.host.plugin_host import host
from shardwright.planning.layouts.layout import Block, Layout
from shardwright.planning.tables.constraints import ParameterConstraints
from shardwright.planning.tables.spec import TableSpec
from shardwright_testing.equality.cases import Case, offered_layouts
from shardwright_testing.equality.random_cases import Cluster, plain_kernel

SHAPES = (Cluster(1, 1), Cluster(1, 2), Cluster(2, 2))
PLAIN = TableSpec("t", 1000, 64, ["f"])


@frozen(slots=False)
class TypeUnderTest:
    """The type, and the constraints with which it applies."""

    sharding_type: ShardingType
    constraints: ParameterConstraints

    @property
    def name(self) -> str:
        """The type's."""
        return self.sharding_type.name

    def rule(self, **fields: Any) -> ParameterConstraints:
        """The constraints that ask for it by name, and more."""
        return evolve(self.constraints, sharding_types=[self.name], **fields)

    def with_more_extras(self) -> TypeUnderTest:
        """Add extras that are for somebody else."""
        extras = {**(self.constraints.extras or {}), "shardwright_testing": {"not_yours": [1, 2.5, None]}}
        return evolve(self, constraints=evolve(self.constraints, extras=extras))

    def without_extras(self) -> TypeUnderTest:
        """Drop all extras."""
        return evolve(self, constraints=evolve(self.constraints, extras=None))

    def has_kernel_for(self, table: TableSpec) -> bool:
        """True if the kernel of its tables takes one with all its columns."""
        request = KernelRequest.of(table, table.embedding_dim, device="cpu", on_this_machine=True)
        return host().compute_kernels.create(self.kernel).supports(request) is True

    def layouts(self, table: TableSpec, cluster: Cluster, min_partition: int | None = None) -> list[Layout]:
        """The layouts of a table, the type asked for by name; none where it does not apply."""
        topology = cluster.topology
        answer = self.sharding_type.supports(table, topology)
        if answer is not True:
            assert isinstance(answer, str), (
                f"{self.name}: supports() must be True or the reason why not, it is {answer!r}"
            )
            return []
        return offered_layouts(self.sharding_type, table, topology, self.rule(min_partition=min_partition))

    def applies(self, case: Case) -> bool:
        """True if every table of a case has a layout."""
        cluster = Cluster.of(case)
        return all(self.layouts(spec, cluster, 1) for spec in case.specs())

    @cached_property
    def gives_keys(self) -> bool:
        """True if ids are keys for it, and not rows."""
        offered = [layout for cluster in SHAPES for layout in self.layouts(PLAIN, cluster)]
        return any(layout.row_map.takes_any_id for layout in offered)

    @cached_property
    def kernel(self) -> str:
        """The name of a kernel to train its tables with."""
        return plain_kernel(takes_any_id=self.gives_keys)

    def asking(self, case: Case) -> Case:
        """The case, with what is asked beside the type."""
        return evolve(case, constraints=self.constraints, has_keys=self.gives_keys)


def dataflow_of(block: Block, layout: Layout) -> Any:
    """A block's own dataflow, or that of its layout."""
    return getattr(block, "dataflow", None) or layout.dataflow
