"""Modules and plans of a resharding, and the reasons against it that one rank knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from torch import nn

from shardwright.errors import InvalidInputError, PlanError, UnsupportedError, nearest
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.plan.sharding import ParameterSharding
from shardwright.planning.tables.spec import TableSpec
from shardwright.runtime.sharded.collections.sharded_collection import ShardedCollection
from shardwright.runtime.step.kernel_groups import (
    is_updated_in_backward,
    kernel_of,
)
from shardwright_plugins.resharding.blocks import (
    TableMove,
    TableValues,
)

Asked: TypeAlias = Mapping[str, tuple[ShardedCollection, Mapping[str, ParameterSharding]]]
"""By path: a module, and how its tables are to be sharded."""


def modules_under(plan: ShardingPlan, sharded: Mapping[str, nn.Module]) -> Asked:
    """The modules of a model with the parts of a plan that are for them.

    Raises:
        PlanError: the plan is for other modules.
        UnsupportedError: a module is none of shardwright's own.
    """
    if not isinstance(plan, ShardingPlan):
        raise InvalidInputError(f"reshard() takes a ShardingPlan, got a {type(plan).__name__}")
    for path in plan.plan:
        if path not in sharded:
            raise PlanError(
                f"the plan is for a module at {path!r}, which is not sharded.{nearest(path, sharded)}"
            )
    asked = {}
    for path, module in sharded.items():
        if path not in plan.plan:
            if not isinstance(module, ShardedCollection):  # a sharder's that has no tables is in no plan
                continue
            raise PlanError(f"the plan has nothing for the module at {path!r}; it is for {sorted(plan.plan)}")
        if not isinstance(module, ShardedCollection):
            raise UnsupportedError(f"a {type(module).__name__} at {path!r} cannot be resharded")
        asked[path] = (module, plan.plan[path])
    return asked


def changes(module: ShardedCollection, params: Mapping[str, ParameterSharding]) -> bool:
    """True if a table of a module is to be sharded otherwise."""
    own = module.inputs.params
    return any(own[name].digest() != params[name].digest() for name in own)


def check_change(spec: TableSpec, old: ParameterSharding, new: ParameterSharding) -> None:
    """Check that a table is updated as before: by its kernel, or by an optimizer of the user."""
    was, will_be = is_updated_in_backward(spec, old), is_updated_in_backward(spec, new)
    if was != will_be:
        raise UnsupportedError(
            f"table {spec.describe()}: the kernel {old.compute_kernel!r} {_runs(was)}, {new.compute_kernel!r} "
            f"{_runs(will_be)}: it cannot go from one to the other while it is trained. Save a checkpoint and build "
            "the model again"
        )


def _runs(is_fused: bool) -> str:
    return "runs the optimizer" if is_fused else "leaves it to one of your own"


def check_optimizer(spec: TableSpec, values: TableValues) -> None:
    """Check that the optimizer of a table that gets new parameters is known."""
    if values.optimizer is None:
        raise InvalidInputError(
            f"table {spec.describe()} gets new parameters, and no optimizer that was given has its old ones: give "
            "those that train it, reshard(plan, optimizer)"
        )


def check_rows_can_move(move: TableMove) -> None:
    """Check that it can be told where a row is: by the plan, or by a kernel that says which keys it has."""
    old, new = (side.layout.row_map.takes_any_id for side in (move.old, move.new))
    states = [kernel_of(side.compute_kernel).row_state for side in (move.old, move.new)]
    if old != new:
        raise UnsupportedError(
            f"table {move.spec.describe()}: its ids are {'keys' if old else 'rows'} now, and "
            f"{'keys' if new else 'rows'} under the new plan: it cannot go from one to the other while it is trained"
        )
    if states[0] != states[1]:
        raise UnsupportedError(
            f"table {move.spec.describe()}: its ids are keys, and where a key's row is, its kernel alone knows; "
            f"{move.old.compute_kernel!r} tells {list(states[0])} of a row, {move.new.compute_kernel!r} "
            f"takes {list(states[1])}. Leave this table and those that share its kernel group as they are"
        )
