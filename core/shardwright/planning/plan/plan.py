"""The sharding plan of a model, and the way to its document and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from shardwright.arguments import checked, typed
from shardwright.host.process import process_host
from shardwright.planning.plan.document import write_plan
from shardwright.planning.plan.reading import read_plan
from shardwright.planning.plan.sharding import EmbeddingModuleShardingPlan, module_text


@frozen(hash=False, field_transformer=typed)
class ShardingPlan:
    """Sharding of every table of a model.

    Args:
        plan: module path -> the plan of its tables.
        document: the rest of the plan document (topology, inputs, objective, plugins, and keys that are not
            known here): kept as it is through ``from_json`` and ``to_json``.

    Example:
        >>> import shardwright as sw
        >>> planner = sw.EmbeddingShardingPlanner(topology=sw.Topology(world_size=2, compute_device="cpu"))
        >>> plan = planner.plan_tables([sw.TableSpec("user_id", num_embeddings=1000, embedding_dim=64)])
        >>> text = plan.to_json()  # a document for a file, editable by hand
        >>> sw.ShardingPlan.from_json(text) == plan
        True
    """

    plan: dict[str, EmbeddingModuleShardingPlan] = field(factory=dict)
    document: Mapping[str, Any] = field(factory=dict, eq=False, repr=False)

    def get_plan_for_module(self, module_path: str) -> EmbeddingModuleShardingPlan | None:
        """The plan of the module at ``module_path``, or ``None``."""
        return self.plan.get(module_path)

    def to_json(self) -> str:
        """The plan document: versioned JSON, editable by hand."""
        return write_plan(self.plan, self.document)

    @classmethod
    @checked
    def from_json(cls, text: str) -> ShardingPlan:
        """The plan in a plan document.

        Raises:
            PlanError: the document is malformed; the text names module, table and shard, and gives the
                numbers.
        """
        return cls(*read_plan(text, process_host()))

    def __str__(self) -> str:
        return "\n\n".join(
            f"module: {path or '(root)'}\n{module_text(plan)}" for path, plan in self.plan.items()
        )
