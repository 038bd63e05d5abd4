"""The options that a model of costs was published with, for those who ask for that model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, frozen

from shardwright.arguments import PositiveInt, typed, whole
from shardwright.planning.tables.constraints import ParameterConstraints


@frozen(field_transformer=typed)
class OptionSpace:
    """Sharding types and kernels offered for a table where its own constraints say nothing.

    Args:
        kernels: sharding type -> the names of the compute kernels offered with it, the preferred first, those that show
            gradients among them; none: the type is offered only to those who name it. Sharding types that are not in
            it are offered as ever.
        min_partition: the fewest columns of a block, where columns are cut.

    Example:
        >>> import shardwright as sw
        >>> tables, topology = [sw.TableSpec("item", 1_000_000, 64, ["item"])], sw.Topology(2, "cpu")
        >>> first = sw.EmbeddingShardingPlanner(topology).plan_tables(tables).plan[""]["item"].sharding_type
        >>> space = sw.OptionSpace({first: ()})
        >>> plan = sw.EmbeddingShardingPlanner(topology, option_space=space).plan_tables(tables)
        >>> plan.plan[""]["item"].sharding_type == first
        False
    """

    kernels: Mapping[str, tuple[str, ...]] = field(factory=dict)
    min_partition: PositiveInt | None = field(default=None, converter=whole)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> OptionSpace:
        """The space in JSON data, see :meth:`to_data`."""
        kernels = {name: tuple(kernels) for name, kernels in data.get("kernels", {}).items()}
        return cls(kernels, data.get("min_partition"))

    def to_data(self) -> dict[str, Any]:
        """Return the space as JSON data."""
        kernels = {name: list(kernels) for name, kernels in self.kernels.items()}
        return {"kernels": kernels, "min_partition": self.min_partition}

    def fill(self, rule: ParameterConstraints) -> ParameterConstraints:
        """Fill in the space's own defaults in the demands on a table."""
        if self.min_partition is None:
            return rule
        return rule.filled_from(ParameterConstraints(min_partition=self.min_partition))

    def has(self, sharding_type: str, rule: ParameterConstraints) -> bool:
        """True if a sharding type is offered to a table with the constraints ``rule``."""
        return rule.sharding_types is not None or self.kernels.get(sharding_type) != ()

    def kernels_of(self, sharding_type: str, rule: ParameterConstraints) -> Sequence[str] | None:
        """The kernels offered with a sharding type; ``None``: those that are offered without a space."""
        return None if rule.compute_kernels is not None else self.kernels.get(sharding_type) or None


EVERYTHING = OptionSpace()
"""Whatever is loaded and serves a table."""
