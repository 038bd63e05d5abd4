"""The contract of an estimator: how long shards take, or how much memory they need, as columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from shardwright.contracts.names import OpenNames

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from shardwright.planning.machines.topology import Topology
    from shardwright.planning.options.options import Options
    from shardwright.planning.tables.option_space import OptionSpace

PERFORMANCE = "performance"
STORAGE = "storage"


class Estimator(ABC, metaclass=OpenNames):
    """Estimates a cost of every shard of every option at once: one value for each run of equal shards.

    The planner calls, on the one rank that plans:

    1. ``estimate`` of the storage estimator, once;
    2. ``estimate`` of the performance estimator, once for each class of ranks of one speed, with a topology of which
       all ranks have that speed (``topology.speed``, which ``topology.read_bandwidth`` takes into account).

    Tables of which ``options.is_frozen`` is true are looked up and never updated: no gradient travels for them and no
    update is made, so that only what goes forward costs anything. All tables of a plan for serving are such.

    An estimator holds no state between calls and never makes one Python object a shard: the columns of
    :class:`~shardwright.planning.options.options.Options` have all that a model of costs needs, the layout's geometry
    among it, so that no estimator has to know a sharding type by name.

    Example:
        >>> import shardwright as sw
        >>> class PerColumn(sw.Estimator):
        ...     name = "per_column"
        ...     def estimate(self, options, topology):
        ...         return {"lookup": 0.5 * options.num_columns}  # ms of each run of equal shards
        >>> planner = sw.EmbeddingShardingPlanner(
        ...     topology=sw.Topology(2, "cpu"), estimator=PerColumn(),
        ...     constraints={"user_id": sw.ParameterConstraints(ranks=0)},
        ... )
        >>> plan = planner.plan_tables([sw.TableSpec("user_id", num_embeddings=1000, embedding_dim=8)])
        >>> plan.document["objective"]["value_ms"]
        4.0
    """

    name: ClassVar[str]
    api: ClassVar[int] = 1
    aliases: ClassVar[tuple[str, ...]] = ()
    measures: ClassVar[str] = PERFORMANCE
    """``"performance"`` (milliseconds a phase) or ``"storage"`` (bytes a memory tier)."""
    depends_on_shape_only: ClassVar[bool] = False
    """True if a table's costs depend on nothing but its shape, data type, pooling, weights, optimizer, number of
    features and constraints.

    Then tables that are alike are planned as one, many times faster. Leave it ``False`` for a model that looks at a
    table's name, module or features.
    """
    preference: ClassVar[int] = 0
    """Above 0: may be taken when none was asked for; the highest is."""

    @abstractmethod
    def estimate(self, options: Options, topology: Topology) -> Mapping[str, npt.NDArray[np.float64]]:
        """The cost of one shard of each run.

        Args:
            options: columns over the distinct tables ``[T]``, options ``[O]`` and runs of equal shards ``[S]``.
            topology: ranks, memory tiers and links.

        Returns:
            performance: phase -> milliseconds a step ``[S]``; storage: memory tier -> bytes ``[S]``. Phases
            are open names; their sum is what a shard adds to its rank's time.
        """

    def serves(self, topology: Topology) -> bool:
        """True if it may be taken unasked for such ranks; for all by default."""
        return True

    def step_phases(
        self,
        phases: Mapping[str, npt.NDArray[np.float64]],
        options: Options,
        chosen: npt.NDArray[np.int64],
        topology: Topology,
    ) -> Mapping[str, npt.NDArray[np.float64]]:
        """Compute the phases of a step, where they overlap, wait for all ranks, or are not all that there is.

        Plans minimise the largest rank's sum of what :meth:`estimate` says, which a search can prove; this is what to
        hold against a clock. A step takes the largest rank's sum of these.

        Args:
            phases: phase -> milliseconds of each rank, ``[W]``.
            options: the options of all tables.
            chosen: the option of each of ``options.all_tables``, ``[A]``.
            topology: the ranks.

        Returns:
            Phase -> milliseconds of each rank, ``[W]``; by default ``phases``.
        """
        return phases

    def refinements(self, topology: Topology) -> Sequence[Callable[..., Any]]:
        """Refinements around each search by this model, the innermost first; none by default.

        A search minimises sums over tables. This is for a model of which :meth:`step_phases` says more.

        Returns:
            Functions ``(search, request, watch)``, as extensions at the point ``refinement`` give them.
        """
        return ()

    def option_space(self, topology: Topology) -> OptionSpace:
        """The options whose cost the model can tell; all by default.

        It holds whenever this is the performance estimator and the user gave no option space. What
        constraints ask of a table goes before.
        """
        from shardwright.planning.tables.option_space import EVERYTHING

        return EVERYTHING

    def provenance(self, options: Options) -> Mapping[str, Any]:
        """The constants the model assumes to price these options, by name, for the report; JSON data."""
        return {}
