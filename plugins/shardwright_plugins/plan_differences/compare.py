"""Two plans compared: which tables changed, what moves to other ranks, and how many bytes that is.

What moves is what a rank holds under the second plan and did not hold under the first: for copies of a table, each copy
that is new. Changes count weights; ``ReshardMoves`` counts the optimizer states too, which travel with their rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from shardwright.errors import PlanError, ShardwrightError
from shardwright.host.plugin_host import host
from shardwright.planning.machines.topology import CPU_DEVICE, Topology
from shardwright.planning.plan.inputs import InputTables, reading_inputs
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.plan.sharding import ParameterSharding
from shardwright.planning.tables.spec import TableSpec
from shardwright_plugins.plan_differences.check import is_stated
from shardwright_plugins.plan_differences.rederived import Rederived
from shardwright_plugins.plan_differences.table_moves import ReshardMoves, TableMoves, moves_of
from shardwright_plugins.plan_differences.value_bytes import ValueBytes, weight_bits


@frozen
class TableChange:
    """One table that the plans shard differently.

    Args:
        path: its module and name.
        before: sharding type and compute kernel; empty where the first plan has no such table.
        after: sharding type and compute kernel in the second plan; empty likewise.
        moved_bytes: weights that ranks must get.
        total_bytes: weights that ranks hold under the second plan, copies counted.
        moves: bytes that go from rank to rank when it is resharded, optimizer states among them.
    """

    path: str
    before: tuple[str, str] | None
    after: tuple[str, str] | None
    moved_bytes: int
    total_bytes: int
    moves: TableMoves = field(factory=TableMoves, repr=False)

    def to_data(self) -> dict[str, Any]:
        """Return JSON data."""
        return {
            "table": self.path,
            "before": list(self.before) if self.before else None,
            "after": list(self.after) if self.after else None,
            "moved_bytes": self.moved_bytes,
            "total_bytes": self.total_bytes,
        }


@frozen
class PlanDifference:
    """Differences between two plans.

    Args:
        changes: the tables that differ, in the order of the first plan, then of the second.
        num_equal: number of tables that do not differ.
        values_ms: the objective of each plan: what its placement costs, added up again, or, where that cannot be done
            here, what its document says.
        stated_ms: objective that each plan's document states instead, where it is another.
        moves: bytes that a resharding sends, weights and optimizer states, and its time by the model.

    Example:
        >>> import shardwright as sw
        >>> planner = sw.EmbeddingShardingPlanner(sw.Topology(2, "cuda"), batch_size=512)
        >>> plan = planner.plan_tables([sw.TableSpec("user", 1_000_000, 64, ["user"])])
        >>> difference = sw.compare_plans(plan, plan)
        >>> len(difference.changes), difference.num_equal
        (0, 1)
    """

    changes: tuple[TableChange, ...]
    num_equal: int
    values_ms: tuple[float | None, float | None]
    stated_ms: tuple[float | None, float | None]
    moves: ReshardMoves = field(eq=False, repr=False)

    @property
    def moved_bytes(self) -> int:
        """Bytes of weights that all ranks must get."""
        return sum(change.moved_bytes for change in self.changes)

    def to_data(self) -> dict[str, Any]:
        """Return JSON data."""
        return {
            "tables": [change.to_data() for change in self.changes],
            "num_equal": self.num_equal,
            "values_ms": list(self.values_ms),
            "stated_ms": list(self.stated_ms),
            "moved_weight_bytes": self.moved_bytes,
            "reshard": self.moves.to_data(),
        }


def compare_plans(first: ShardingPlan, second: ShardingPlan) -> PlanDifference:
    """Find what moves when a model goes from one plan to another.

    Raises:
        PlanError: a table has another size in the second plan.

    Example:
        >>> import shardwright as sw
        >>> tables = [sw.TableSpec("user", 1_000_000, 64, ["user"]), sw.TableSpec("shop", 1000, 64, ["shop"])]
        >>> planner = sw.EmbeddingShardingPlanner(sw.Topology(2, "cuda"), batch_size=512)
        >>> plan = planner.plan_tables(tables)
        >>> sw.compare_plans(plan, plan).num_equal
        2
    """
    before, after = _tables(first), _tables(second)
    stated = _Comparison.of(first, second)
    changes, num_equal, counts_states = [], 0, True
    for path in dict.fromkeys([*before, *after]):
        old, new = before.get(path), after.get(path)
        if old is not None and old == new:
            num_equal += 1
            continue
        values, has_states = stated.values(path, old)
        counts_states &= has_states
        changes.append(stated.change(path, old, new, values))
    (value, said), (other_value, other_said) = map(_value, (first, second))
    moves = ReshardMoves(tuple(change.moves for change in changes), stated.topology, counts_states)
    return PlanDifference(tuple(changes), num_equal, (value, other_value), (said, other_said), moves)


def _value(plan: ShardingPlan) -> tuple[float | None, float | None]:
    """A plan's value, and what its document says if that is another."""
    stated: float | None = plan.document.get("objective", {}).get("value_ms")
    try:
        real = Rederived.of(plan, host()).loaded_plan().value_ms
    except (
        ShardwrightError
    ):  # no inputs, or a plugin that is not installed here: moves can be told without it
        return stated, None
    return real, None if is_stated(real, plan) else stated


def _tables(plan: ShardingPlan) -> dict[str, ParameterSharding]:
    return {
        f"{module}.{name}" if module else name: sharding
        for module, tables in plan.plan.items()
        for name, sharding in tables.items()
    }


@frozen(eq=False)
class _Comparison:
    """Both plans, with what their documents say of tables and ranks.

    Args:
        tables: specifications, by path.
        topology: the ranks.
    """

    tables: Mapping[str, TableSpec]
    topology: Topology
    _known: dict[tuple[bytes, bytes, ValueBytes], TableMoves] = field(factory=dict)

    @classmethod
    def of(cls, first: ShardingPlan, second: ShardingPlan) -> _Comparison:
        specs = {
            table.path: table
            for plan in (second, first)  # what moves is what the first plan has
            for table in InputTables.of(plan.document).tables.values()
        }
        return cls(specs, _topology_of(first, second))

    def values(self, path: str, old: ParameterSharding | None) -> tuple[ValueBytes, bool]:
        """Bytes of a table's values, and whether states are among them."""
        spec = self.tables.get(path)
        if spec is None or old is None:
            return ValueBytes(weight_bits(spec) if spec else 32), old is None
        return value_bytes(spec, old)

    def change(
        self, path: str, old: ParameterSharding | None, new: ParameterSharding | None, values: ValueBytes
    ) -> TableChange:
        """The change of one table, of which one plan at least has something to say."""
        if old is not None and new is not None:
            _check_same_size(path, old, new)
        moves = self._moves(old, new, values) if old and new else TableMoves()
        held = _held_bytes(new, values)
        return TableChange(path, _way(old), _way(new), moves.received_weights if old else held, held, moves)

    def _moves(self, old: ParameterSharding, new: ParameterSharding, values: ValueBytes) -> TableMoves:
        """The moves of one table; those of tables that are alike are counted once."""
        key = old.layout.digest(), new.layout.digest(), values
        if key not in self._known:
            self._known[key] = moves_of(old.layout, new.layout, values, self.topology)
        return self._known[key]


def value_bytes(table: TableSpec, sharding: ParameterSharding) -> tuple[ValueBytes, bool]:
    """Bytes of the values that a table has under a plan, and whether its optimizer's states are known."""
    try:
        kernel = host().compute_kernels.create(sharding.compute_kernel)
        device = sharding.device_on(sharding.ranks[0])
        return ValueBytes.of(table, kernel, device, sharding.layout.extras), True
    except ShardwrightError:  # a plugin that is not installed here, or that does not know such a table
        return ValueBytes(weight_bits(table)), False


def _topology_of(first: ShardingPlan, second: ShardingPlan) -> Topology:
    """The ranks that the documents state; without any, one host with all ranks of the plans."""
    for plan in (second, first):
        if "topology" in plan.document:
            with reading_inputs():
                return Topology.from_data(plan.document["topology"])
    every = [sharding for plan in (first, second) for sharding in _tables(plan).values()]
    most = max((rank for sharding in every for rank in sharding.ranks), default=0)
    device = every[0].device if every else CPU_DEVICE
    return Topology(most + 1 if isinstance(device, str) else len(device), device)


def _held_bytes(sharding: ParameterSharding | None, values: ValueBytes) -> int:
    """Weights that ranks have, bytes."""
    blocks = sharding.layout.blocks if sharding else ()
    return sum(values.weights(block.num_rows * block.num_columns) for block in blocks)


def _way(sharding: ParameterSharding | None) -> tuple[str, str] | None:
    return (sharding.sharding_type, sharding.compute_kernel) if sharding else None


def _check_same_size(path: str, old: ParameterSharding, new: ParameterSharding) -> None:
    sizes = [
        (side.layout.row_map.num_rows, max(block.columns.stop for block in side.layout.blocks))
        for side in (old, new)
    ]
    if sizes[0] != sizes[1]:
        raise PlanError(
            f"table {path!r} has {sizes[0][0]} x {sizes[0][1]} elements in the first plan and {sizes[1][0]} x "
            f"{sizes[1][1]} in the second: these are no two plans of one model"
        )
