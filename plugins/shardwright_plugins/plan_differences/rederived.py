"""Options and costs had again from a plan document: what was asked stands in it, sharding types and estimators answer.

Nothing here searches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from shardwright.arguments import PositiveInt, problem, some
from shardwright.errors import PlanError
from shardwright.planning.arrays import distinct
from shardwright.planning.layouts.blocks import UNPLACED
from shardwright.planning.layouts.layout import Layout
from shardwright.planning.machines.reservations import as_reservation
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.enumeration import prepare
from shardwright.planning.options.inputs import Request
from shardwright.planning.options.options import Options
from shardwright.planning.options.planning_plugins import PlanningPlugins, PluginChoice
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.plan.inputs import InputTables, reading_inputs
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.plan.sharding import ParameterSharding
from shardwright.planning.search.loaded import LoadedPlan
from shardwright.planning.search.objectives import LARGEST_RANK_TIME, checked_objective
from shardwright.planning.search.placement import Placed
from shardwright.planning.tables.constraints import Constraints
from shardwright.planning.tables.option_space import OptionSpace
from shardwright.planning.tables.spec import TableSpec

if TYPE_CHECKING:
    from shardwright.host.plugin_host import PluginHost


@frozen(eq=False)
class Rederived:
    """Search space of a plan, made again from its document.

    Args:
        plan: the plan.
        space: options and costs, as they were when it was made.
        plugins: the plugins that plan.
    """

    plan: ShardingPlan
    space: SearchSpace
    plugins: PlanningPlugins

    @classmethod
    def of(cls, plan: ShardingPlan, plugin_host: PluginHost) -> Rederived:
        """Ask sharding types and estimators again what the planner asked.

        Args:
            plan: plan with the document that states its inputs.
            plugin_host: registries of installed plugins.

        Raises:
            PlanError: the document does not say what was asked, or speaks of other tables than its plan.
            ShardwrightError: raised by :func:`~shardwright.planning.options.enumeration.prepare`.
        """
        document = plan.document
        inputs = document.get("inputs")
        if not isinstance(inputs, Mapping) or "tables" not in inputs:
            raise PlanError(
                "the plan document has no inputs.tables: only a planner's document says what was asked of it, so that "
                "options and costs can be had again"
            )
        asked = InputTables.of(document)
        tables = list(asked.tables.values())
        _check_same_tables(asked, plan)
        with reading_inputs():
            plugins = _plugins_of(inputs, plugin_host)
            request = _request_of(document, asked.constraints)
        return cls(plan, prepare(tables, request, plugins), plugins)

    @property
    def options(self) -> Options:
        """All options."""
        return self.space.options

    def sharding(self, table: TableSpec) -> ParameterSharding:
        """Return the plan's sharding of a table."""
        return self.plan.plan[table.module][table.name]

    @cached_property
    def match(self) -> tuple[list[int | None], list[list[int]]]:
        """The option of each table in the plan, if it is one, and its ranks in that option's order."""
        distinct = self.options.distinct_table.tolist()
        found = [
            matched_option(self.options, own, self.sharding(table))
            for table, own in zip(self.options.all_tables, distinct, strict=True)
        ]
        return [option for option, _ in found], [ranks for _, ranks in found]

    def unknown_tables(self) -> list[str]:
        """List the tables whose shards are those of no option, a sentence each."""
        pairs = zip(self.options.all_tables, self.match[0], strict=True)
        return [self._unknown_text(table) for table, option in pairs if option is None]

    def loaded_plan(self) -> LoadedPlan:
        """The plan with its loads.

        Raises:
            PlanError: the shards of a table are those of no option, so that they have no cost.
        """
        for unknown in self.unknown_tables():
            raise PlanError(unknown)
        chosen, ranks = self.match
        placed = Placed.of(self.space, [option for option in chosen if option is not None], ranks)
        return LoadedPlan(self.space, placed.proposal, placed.ranks)

    def _unknown_text(self, table: TableSpec) -> str:
        """Say that the shards of a table are those of no option."""
        sharding = self.sharding(table)
        return (
            f"table {table.describe()}: no option has the plan's {len(sharding.layout.blocks)} shards on ranks "
            f"{some(sharding.ranks)} as {sharding.sharding_type!r} with kernel {sharding.compute_kernel!r}, so "
            "their cost is not known"
        )


def matched_option(
    options: Options, distinct: int, sharding: ParameterSharding
) -> tuple[int | None, list[int]]:
    """The option that shards a table as a plan does, and its ranks in the option's order; ``None`` if there is none.

    Args:
        options: all options.
        distinct: the distinct table.
        sharding: the table's part of the plan.
    """
    for option in options.of_table(distinct):
        if (options.type_of(option).name, options.kernel_of(option).name) != (
            sharding.sharding_type,
            sharding.compute_kernel,
        ):
            continue
        ranks = _ranks_in_order(options.layouts[option], sharding.layout)
        if ranks is not None and _are_on(options.devices_of(option), ranks, sharding):
            return option, ranks
    return None, []


def _are_on(devices: Sequence[str], ranks: Sequence[int], sharding: ParameterSharding) -> bool:
    """True if ranks have the devices that an option's shards are for; all have them where there is one type."""
    is_mixed = not isinstance(sharding.device, str)
    return not is_mixed or [sharding.device_on(rank) for rank in ranks] == list(devices)


def _blocks_by_cut(layout: Layout) -> dict[Any, list[tuple[int, int]]]:
    """Rows and columns of blocks -> the place and rank of each; parts of equal bounds are the same rows."""
    found: dict[Any, list[tuple[int, int]]] = {}
    columns, row_map = layout.columns, layout.row_map
    rows = {part: row_map[part].bounds or (row_map, part) for part in distinct(columns.part).tolist()}
    numbers = np.stack([columns.part, columns.start, columns.stop, columns.rank], axis=1).tolist()
    for place, (part, start, stop, rank) in enumerate(numbers):
        found.setdefault((rows[part], start, stop), []).append((place, rank))
    return found


def _ranks_in_order(layout: Layout, planned: Layout) -> list[int] | None:
    """The plan's ranks in the order of a layout's blocks; ``None`` if these are other blocks, or live elsewhere."""
    offered, placed = _blocks_by_cut(layout), _blocks_by_cut(planned)
    if offered.keys() != placed.keys():
        return None
    ranks = [0] * len(layout.blocks)
    for cut, blocks in offered.items():
        left = Counter(rank for _, rank in placed[cut])
        free = [place for place, rank in blocks if rank == UNPLACED]
        left.subtract(rank for _, rank in blocks if rank != UNPLACED)
        if left.total() != len(free) or min(left.values()) < 0:
            return None
        taken = dict(zip(free, left.elements(), strict=True))
        for place, rank in blocks:
            ranks[place] = taken.get(place, rank)
    return ranks


def _check_same_tables(asked: InputTables, plan: ShardingPlan) -> None:
    listed = set(asked.tables)
    planned = {(path, name) for path, module in plan.plan.items() for name in module}
    for missing, where, other in (
        (listed - planned, "inputs.tables", "modules"),
        (planned - listed, "modules", "inputs.tables"),
    ):
        if missing:
            names = [f"{path}.{name}" if path else name for path, name in sorted(missing)]
            raise PlanError(f"the plan document has tables in {where} that are not in {other}: {some(names)}")


def _plugins_of(inputs: Mapping[str, Any], plugin_host: PluginHost) -> PlanningPlugins:
    space = inputs.get("option_space")
    return PluginChoice(
        estimator=inputs["estimator"]["value"],
        storage_estimator=inputs["storage_estimator"]["value"],
        option_space=None if space is None else OptionSpace.from_data(space["value"]),
    ).resolve(plugin_host)


def _request_of(document: Mapping[str, Any], constraints: Constraints) -> Request:
    inputs = document["inputs"]
    batch_size = inputs["batch_size"]["value"]
    if wrong := problem("inputs.batch_size", batch_size, PositiveInt):
        raise PlanError(f"the plan document's {wrong}")
    return Request(
        topology=Topology.from_data(document["topology"]),
        constraints=constraints,
        given_batch_size=batch_size,
        given_reservation=as_reservation(inputs["storage_reservation"]["value"]),
        objective=checked_objective(document.get("objective", {}).get("name", LARGEST_RANK_TIME)),
    )
