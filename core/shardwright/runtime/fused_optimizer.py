"""The optimizers inside kernels, seen as one ``KeyedOptimizer``: learning rates in, state in and out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwright.errors import InvalidInputError, nearest
from shardwright.optim.keyed import KeyedOptimizer
from shardwright.planning.optimizers import OptimizerSpec
from shardwright.runtime.lookup import Lookup

if TYPE_CHECKING:
    from shardwright.runtime.sharded_embedding_bag import ShardedTable
    from shardwright.runtime.table_state import LocalBlock, TableState

_STEP = "step"


class FusedOptimizer(KeyedOptimizer):
    """What runs in the backward pass of a sharded module.

    Parameters are grouped by optimizer. A learning rate set in ``param_groups`` (by hand or by a scheduler) holds from
    the next forward pass on; :meth:`step` has nothing else to do. State dicts are those of the unsharded tables and the
    torch optimizers of the same names; ``state_dict()`` gathers and must be called on every rank.

    Args:
        tables: the module's tables by parameter name; those whose kernel fuses no optimizer are left out.
        lookups: the module's local kernel groups.
    """

    def __init__(self, tables: Mapping[str, ShardedTable], lookups: Sequence[Lookup]) -> None:
        self._tables = {name: table for name, table in tables.items() if _is_fused(table.state)}
        self._lookups = list(lookups)
        by_optimizer: dict[OptimizerSpec, list[str]] = {}
        for name, table in self._tables.items():
            assert table.state.table.optimizer is not None  # _is_fused
            by_optimizer.setdefault(table.state.table.optimizer, []).append(name)
        params = {name: _representative(table) for name, table in self._tables.items()}
        groups = [
            {"params": [params[name] for name in names], "lr": spec.learning_rate, **dict(spec.parameters)}
            for spec, names in by_optimizer.items()
        ]
        super().__init__(params, {}, groups)
        self._group_of = {spec: index for index, spec in enumerate(by_optimizer)}
        self._names_of = list(by_optimizer.values())
        self._applied: list[float] = [spec.learning_rate for spec in by_optimizer]

    def __repr__(self) -> str:
        lines = [
            f"  {spec.name}({_hyperparameters(self.param_groups[index])}): {', '.join(self._names_of[index])}"
            for spec, index in self._group_of.items()
        ]
        return "\n".join([f"{type(self).__name__}(", *lines, ")"])

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Hand changed learning rates to the kernels; updates happened in the backward pass."""
        loss = closure() if closure is not None else None
        self.apply_learning_rates()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Hand changed learning rates to the kernels; there are no gradients to clear."""
        self.apply_learning_rates()

    def apply_learning_rates(self) -> None:
        """Hand changed learning rates to the kernels."""
        rates = [float(group["lr"]) for group in self.param_groups]
        if rates == self._applied:
            return
        for lookup in self._lookups:
            spec = lookup.blocks[0].request.optimizer
            if spec in self._group_of and not lookup.parameters():
                lookup.set_learning_rate(rates[self._group_of[spec]])
        self._applied = rates

    def state_dict(self) -> dict[str, Any]:
        """The state under parameter names, whole, in host memory; a collective, every rank makes this call.

        Returns:
            ``{"state": {parameter name: {state name: tensor}}, "param_groups": [...]}``; groups name parameters.
        """
        state = {name: self._gather(table) for name, table in self._tables.items()}
        groups = [
            {"params": list(names), **{key: value for key, value in group.items() if key != "params"}}
            for names, group in zip(self._names_of, self.param_groups, strict=True)
        ]
        return {"state": {name: values for name, values in state.items() if values}, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the state of an unsharded or differently sharded optimizer; no collective.

        Raises:
            InvalidInputError: parameters or states are missing or unknown, or have another shape; naming them.
        """
        given = state_dict["state"]
        for name in given:
            if name not in self._tables:
                raise InvalidInputError(f"no fused parameter {name!r} here.{nearest(name, self._tables)}")
        for name, table in self._tables.items():
            self._scatter(name, table, given.get(name))
        for names, group in zip(self._names_of, self.param_groups, strict=True):
            for other in state_dict.get("param_groups", []):
                if set(names) & set(other["params"]):
                    group.update({key: value for key, value in other.items() if key in group and key != "params"})
        self.apply_learning_rates()

    def _gather(self, table: ShardedTable) -> dict[str, Tensor]:
        # Ranks without a block of the table learn from an owner which states there are.
        communicator, owner = table.state.communicator, _first_owner(table.state)
        step, columns = communicator.broadcast_object(_outline(table), owner)
        gathered = {} if step is None else {_STEP: torch.tensor(step)}
        for name, width in columns.items():

            def values(local: LocalBlock, name: str = name) -> Tensor:
                return table.lookup_of(local).optimizer_state(local.index)[name]

            gathered[name] = table.state.gather(values, columns=width, dtype=torch.float32)
        return gathered

    def _scatter(self, name: str, table: ShardedTable, given: Mapping[str, Any] | None) -> None:
        for local in table.state.local:
            lookup = table.lookup_of(local)
            own = lookup.optimizer_state(local.index)
            if not own:
                continue
            if given is None or set(given) != set(own):
                raise InvalidInputError(
                    f"{name!r}: its optimizer keeps {sorted(own)}, the state to load has {sorted(given or ())}"
                )
            lookup.load_step(float(given[_STEP]))
        for state_name, whole in (given or {}).items():
            if state_name != _STEP and table.state.local:

                def target(local: LocalBlock, state_name: str = state_name) -> Tensor:
                    return table.lookup_of(local).optimizer_state(local.index)[state_name]

                table.state.scatter(whole, target)


def _is_fused(state: TableState) -> bool:
    from shardwright.runtime.exchange_plan import kernel_of

    return state.table.optimizer is not None and kernel_of(state.sharding.compute_kernel).fuses_optimizer


def _representative(table: ShardedTable) -> Tensor:
    """This rank's weights of the table, or an empty parameter where it has none."""
    return next(iter(table.parameters()), torch.nn.Parameter(torch.empty(0)))


def _first_owner(state: TableState) -> int:
    rank = next(block.rank for block in state.sharding.layout.blocks if block.num_rows)
    assert rank is not None  # the plan's validator
    return rank


def _outline(table: ShardedTable) -> tuple[float | None, dict[str, int]]:
    """The number of updates and, for each other state, the columns of the whole table's; of a local block."""
    if not table.state.local:
        return None, {}
    local = table.state.local[0]
    lookup = table.lookup_of(local)
    states = lookup.optimizer_state(local.index)
    dim = table.state.table.embedding_dim
    columns = {name: 1 if name in lookup.states_per_row else dim for name in states if name != _STEP}
    return (float(states[_STEP]) if _STEP in states else None), columns


def _hyperparameters(group: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in group.items() if name != "params")
