"""The contract of a sharding type: a name and the layouts it offers for a table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from shardwright.contracts.names import OpenNames
from shardwright.planning.layouts.layout import DATAFLOWS, Dataflow, Layout
from shardwright.planning.layouts.row_maps import ROW_MAPS, RowMap

if TYPE_CHECKING:
    from shardwright.planning.machines.topology import Topology
    from shardwright.planning.tables.constraints import ParameterConstraints
    from shardwright.planning.tables.spec import TableSpec


Offered: TypeAlias = Literal["always", "by_name"]
"""Rules for offering a sharding type to tables."""
ALWAYS: Offered = "always"
BY_NAME: Offered = "by_name"


class ShardingType(ABC, metaclass=OpenNames):
    """A way to cut a table into blocks.

    The planner calls :meth:`layouts` for each table and offers each layout with each compute kernel; the engine
    derives routing, memory, traffic, checkpoints and the report from the layout that was chosen. Who reads a plan
    calls it again, for the table and the constraints that the document names, and compares: answers must be the same.

    ``ShardingType.SOME_NAME.value`` is ``"some_name"`` for every registered name, as with TorchRec's enumeration,
    but the set of names is open.

    Example:
        >>> import shardwright as sw
        >>> class LastRank(sw.ShardingType):
        ...     name, abbreviation = "last_rank", "LR"
        ...     def layouts(self, table, topology, constraints):
        ...         yield sw.Layout([sw.Block(table.all_rows, table.all_columns, rank=topology.world_size - 1)])
        >>> table, topology = sw.TableSpec("user_id", num_embeddings=1000, embedding_dim=8), sw.Topology(4, "cpu")
        >>> [layout.ranks for layout in LastRank().layouts(table, topology, sw.ParameterConstraints())]
        [[3]]
    """

    name: ClassVar[str]
    abbreviation: ClassVar[str]
    """Two to four capitals for the report."""
    api: ClassVar[int] = 1
    aliases: ClassVar[tuple[str, ...]] = ()
    row_maps: ClassVar[tuple[type[RowMap], ...]] = ROW_MAPS
    """The row maps its layouts use; a plugin with its own lists it here, so that a plan can be read back."""
    dataflows: ClassVar[tuple[type[Dataflow], ...]] = DATAFLOWS
    """The dataflows its layouts use."""

    offered: ClassVar[Offered] = BY_NAME
    """Rule for asking for layouts: ``"by_name"``, for tables whose constraints name the type, or ``"always"``.

    So installing a type changes no plan of somebody who does not ask for it. ``"always"`` offers it to tables without
    ``sharding_types`` in their constraints too. It is for types that such tables ask for in another way, by ``extras``
    say, and that return no layout for all others: with more options, a search may end at a worse plan.
    """
    depends_on_shape_only: ClassVar[bool] = False
    """True if the answers depend on nothing of a table but its shape, data type, pooling, weights and optimizer.

    Then the planner asks once for all tables that are alike. Leave it ``False`` for a type that looks at a
    table's name, module or features, or at constraints other than ``sharding_types`` and ``min_partition``.
    """

    @abstractmethod
    def layouts(
        self, table: TableSpec, topology: Topology, constraints: ParameterConstraints
    ) -> Iterable[Layout]:
        """The ways to cut ``table`` over ``topology``; none if this type does not apply.

        Args:
            table: the table's specification.
            topology: ranks, hosts and their links.
            constraints: demands of the user on this table (``min_partition``, ...).

        Returns:
            Layouts that differ in their ``variant``. Blocks with ``rank=None`` may go to any rank; those with one
            ``host_group`` to ranks of one host.

        Raises:
            UnsupportedError: this type does not apply here; the planner shows the text as the reason.
        """

    def supports(self, table: TableSpec, topology: Topology) -> Literal[True] | str:
        """``True``, or the reason why this type does not apply to ``table``."""
        return True
