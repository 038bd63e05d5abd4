"""A resharding of one collection that stands in no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.contracts.extension import Resharded
from shardwright.planning.plan.sharding import ParameterSharding
from shardwright.runtime.sharded.collections.sharded_collection import ShardedCollection
from shardwright_plugins.resharding.reshard import reshard


def reshard_collection(
    module: ShardedCollection, params: Mapping[str, ParameterSharding], *optimizers: Any, **limits: Any
) -> Resharded:
    """Take a collection to another plan, as ``model.reshard`` does a model; every rank makes this call."""
    asked = {module.inputs.specs[0].module: (module, params)}
    return reshard(asked, module.env, optimizers, **{"max_extra_bytes": None, "piece_bytes": None, **limits})
