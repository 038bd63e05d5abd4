"""Answers of sharding types for tables: layouts, or the reason why there are none."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Annotated

from attrs import frozen

from shardwright.arguments import Within
from shardwright.contracts.sharding_type import ShardingType
from shardwright.errors import PlanningError
from shardwright.planning.arrays import FREE
from shardwright.planning.layouts.layout import Layout
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.shapes import Runs, layouts_on_devices
from shardwright.planning.plugin_calls import check_answer
from shardwright.planning.tables.constraints import ParameterConstraints
from shardwright.planning.tables.spec import TableSpec

_FRACTION = Annotated[float, Within(ge=0, le=1 + 1e-9)]


@frozen(eq=False)
class LayoutOffer:
    """Answer of a sharding type for a table: layouts, or the reason why there are none."""

    layouts: tuple[tuple[Layout, Runs], ...] = ()
    reason: str = ""

    @classmethod
    def of(
        cls,
        kind: ShardingType,
        table: TableSpec,
        topology: Topology,
        rule: ParameterConstraints,
        go_on: Callable[[], None],
    ) -> LayoutOffer:
        """Ask a sharding type for layouts, and check its answer.

        Args:
            kind: the sharding type.
            table: table to cut.
            topology: over what.
            rule: demands of the user on the table.
            go_on: called now and then; ends the work by raising.

        Raises:
            PlanningError: it raised, or gave something that is no layout, two layouts that nothing tells apart, or a
                rank that there is not; or a row map's part gets no part of the ids.
        """
        declined: list[str] = []
        try:
            answer = kind.supports(table, topology)
            if answer is not True:
                return cls(reason=reason_of(answer))
            layouts = tuple(layouts_on_devices(kind, table, topology, rule, go_on, declined))
        except Exception as error:
            # A plugin's code: whatever it raises, the user must learn whose it is.
            raise PlanningError(
                f"sharding type {kind.name!r} failed for table {table.describe()}: "
                f"{type(error).__name__}: {error}"
            ) from error
        for layout, runs in layouts:
            for run in runs:
                check_answer(f"row map {layout.row_map.name!r}", "id_fraction_of", run.id_fraction, _FRACTION)
            for name, count, of in (
                ("rank", topology.world_size, "ranks"),
                ("local_rank", topology.local_world_size, "ranks of a host"),
            ):
                firsts = zip(map(attrgetter(name), runs), runs, strict=True)
                rank = max((first + run.length - 1 for first, run in firsts if first != FREE), default=FREE)
                if rank >= count:
                    raise PlanningError(
                        f"sharding type {kind.name!r} broke its contract: a block of its layout {layout.variant!r} "
                        f"of table {table.describe()} is on rank {rank} of {count} {of}"
                    )
        reasons = dict.fromkeys(declined or ["offers no layout for this table"])
        return cls(layouts, "" if layouts else "; ".join(reasons))


def reason_of(answer: object) -> str:
    """Return the reason that `supports` gave; name the fault of an answer that is none."""
    if isinstance(answer, str):
        return answer
    return f"supports() returned {answer!r}; it must be True, or a text that says why not"
