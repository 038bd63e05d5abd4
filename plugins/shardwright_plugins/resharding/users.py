"""Optimizers of the user's own that have parameters of tables: whose, and what becomes of them in a resharding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.errors import InvalidInputError
from shardwright.optim.combined import leaves_of
from shardwright.optim.keyed import KeyedOptimizer
from shardwright.runtime.sharded.tables.fused_optimizer import FusedOptimizer
from shardwright.runtime.sharded.tables.sharded_table import ShardedTable


@frozen
class Holder:
    """An optimizer that has a table's parameters.

    Args:
        optimizer: its number.
        group: number of the group in it.
        name: its name of the first block's parameter; empty where it has no names.
    """

    optimizer: int
    group: int
    name: str


@frozen(eq=False)
class UserOptimizers:
    """The optimizers that a resharding was given, in order; the same on every rank.

    Args:
        leaves: those that have state themselves.
    """

    leaves: Sequence[Optimizer]

    @classmethod
    def of(cls, optimizers: Sequence[Optimizer]) -> UserOptimizers:
        """All within some optimizers; fused ones are the model's own.

        Raises:
            InvalidInputError: something is no optimizer.
        """
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                raise InvalidInputError(f"after the plan come optimizers, got a {type(optimizer).__name__}")
        every = [leaf for optimizer in optimizers for _, leaf in leaves_of(optimizer)]
        found = {id(leaf): leaf for leaf in every if not isinstance(leaf, FusedOptimizer)}
        return cls(list(found.values()))

    def holder_of(self, table: ShardedTable) -> Holder | None:
        """The optimizer that has the parameters of a table here, if one has."""
        own = {id(parameter) for parameter in table.parameters()}
        for number, leaf in enumerate(self.leaves):
            params: Mapping[str, Tensor] = leaf.params if isinstance(leaf, KeyedOptimizer) else {}
            name = next((name for name, each in params.items() if id(each) in own), "")
            for place, group in enumerate(leaf.param_groups):
                if any(id(parameter) in own for parameter in group["params"]):
                    return Holder(number, place, name)
        return None

    def states_of(self, table: ShardedTable) -> list[Mapping[str, Any]]:
        """The state that they keep of each local block of a table."""
        return [self._state(parameter) for parameter in table.block_parameters]

    def _state(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        return next((leaf.state[parameter] for leaf in self.leaves if parameter in leaf.state), {})

    def forget(self, table: ShardedTable, holder: Holder) -> None:
        """Take a table's parameters here out of the optimizer that has them."""
        leaf, own = self.leaves[holder.optimizer], {id(parameter) for parameter in table.parameters()}
        for parameter in table.parameters():
            leaf.state.pop(parameter, None)
        for group in leaf.param_groups:
            group["params"][:] = [each for each in group["params"] if id(each) not in own]
        if isinstance(leaf, KeyedOptimizer):
            _replace(leaf, {name: each for name, each in leaf.params.items() if id(each) not in own})

    def take(self, table: ShardedTable, holder: Holder, states: Sequence[Mapping[str, Any]]) -> None:
        """Give an optimizer the new parameters of a table.

        Args:
            table: sharded as it is now.
            holder: the optimizer, and the group in it.
            states: its state of each local block.
        """
        leaf, parameters = self.leaves[holder.optimizer], list(table.parameters())
        leaf.param_groups[holder.group]["params"] += parameters
        for parameter, state in zip(table.block_parameters, states, strict=True):
            if state:
                leaf.state[parameter] = dict(state)
        if isinstance(leaf, KeyedOptimizer):
            named = {f"{holder.name}_{n}" if n else holder.name: own for n, own in enumerate(parameters)}
            _replace(leaf, {**leaf.params, **named})


def _replace(leaf: KeyedOptimizer, params: Mapping[str, Tensor]) -> None:
    """Change the parameters of an optimizer in place: optimizers around it look at the same ones."""
    assert isinstance(leaf.params, dict)  # only combined ones have a view, and these have no state themselves
    leaf.params.clear()
    leaf.params.update(params)
