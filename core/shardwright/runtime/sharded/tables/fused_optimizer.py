"""The optimizers inside kernels, seen as one ``KeyedOptimizer``: learning rates in, state in and out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwright.errors import InvalidInputError, UnknownNameError, UnsupportedError
from shardwright.optim._keyed_state import check_names, write_groups
from shardwright.optim.fused import spec_to_torch
from shardwright.optim.keyed import KeyedOptimizer
from shardwright.planning.tables.optimizers import OptimizerSpec
from shardwright.runtime.ranks.meeting import Meeting
from shardwright.runtime.sharded.tables.blocked_tensor import (
    BlockedTensor,
    copied_blocks,
    is_live,
    whole_tensor,
)
from shardwright.runtime.step.engine import CollectionEngine

if TYPE_CHECKING:
    from shardwright.runtime.sharded.tables.sharded_table import ShardedTable
    from shardwright.runtime.sharded.tables.table_state import LocalBlock

_STEP = "step"
_FIXED = ("betas", "eps", "weight_decay")
"""Hyperparameters that kernels are built with; only learning rates can change."""


class FusedOptimizer(KeyedOptimizer):
    """The optimizers that run in the backward pass of a sharded module.

    Parameters are grouped by optimizer. A learning rate set in ``param_groups`` (by hand or by a scheduler) holds from
    the next forward pass on: a step keeps, in every kernel, the rate with which its forward pass began. There is
    nothing else for :meth:`step` to do; with ``update="in_step"`` it makes the updates, with the rate that is set when
    it is called. State dicts are those of the unsharded tables and the torch optimizers of the
    same names, over several ranks with sharded tensors; every rank has the entries of all tables.

    Args:
        tables: the module's tables by parameter name; those whose kernel fuses no optimizer are left out.
        engine: the engine that runs them: learning rates, kept gradients and events are its.
        meeting: meeting of the ranks before tables are gathered or loaded.
    """

    def __init__(
        self,
        tables: Mapping[str, ShardedTable],
        engine: CollectionEngine,
        meeting: Meeting,
    ) -> None:
        self._tables = {name: table for name, table in tables.items() if table.is_fused}
        self._engine, self._meeting = engine, meeting
        by_optimizer: dict[OptimizerSpec, list[str]] = {}
        for name, table in self._tables.items():
            assert table.state.table.optimizer is not None  # ShardedTable.is_fused
            by_optimizer.setdefault(table.state.table.optimizer, []).append(name)
        params = {name: table.representative() for name, table in self._tables.items()}
        groups = [
            {"params": self._parameters_of(names), **_group_of(spec)} for spec, names in by_optimizer.items()
        ]
        super().__init__(params, {}, groups)
        self._columns = self._columns_of_states()
        self._specs = list(by_optimizer)
        self._names_of = list(by_optimizer.values())
        self._applied = [spec.learning_rate for spec in self._specs]
        self._fixed = [
            {name: group[name] for name in (*_FIXED, *dict(spec.parameters)) if name in group}
            for spec, group in zip(by_optimizer, groups, strict=True)
        ]

    def __repr__(self) -> str:
        lines = [
            f"  {spec.name}({_listed(group)}){', by default' * spec.is_assumed}: {', '.join(names)}"
            for spec, group, names in zip(self._specs, self.param_groups, self._names_of, strict=True)
        ]
        return "\n".join([f"{type(self).__name__}(", *lines, ")"])

    def rebind(self, tables: Mapping[str, ShardedTable], engine: CollectionEngine) -> None:
        """Go on as the optimizer of the same tables sharded otherwise; groups and learning rates stay.

        Args:
            tables: those of the module by parameter name; the fused ones are those that it had.
            engine: the engine that runs them now.
        """
        self._tables = {name: tables[name] for name in self._tables}
        self._engine = engine
        assert isinstance(self.params, dict)  # as it was made
        self.params.update({name: table.representative() for name, table in self._tables.items()})
        for group, names in zip(self.param_groups, self._names_of, strict=True):
            # In place: a scheduler, or an optimizer that this is a part of, has the same group.
            group["params"][:] = self._parameters_of(names)
        self._applied = [float(group["lr"]) for group in self.param_groups]
        engine.rates.renew(dict(zip(self._specs, self._applied, strict=True)).get)

    def _parameters_of(self, names: Iterable[str]) -> list[Tensor]:
        """The parameters of all blocks of tables, as gradient scalers and clipping functions go through them."""
        return [own for name in names for own in self._tables[name].parameters()]

    @property
    def tables(self) -> Mapping[str, ShardedTable]:
        """The tables whose optimizer it is, by parameter name."""
        return self._tables

    def check_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Check groups as any keyed optimizer does; beyond that only learning rates may differ.

        Raises:
            UnsupportedError: a group has other values of what kernels are built with.
        """
        super().check_groups(groups)
        for names, fixed in zip(self._names_of, self._fixed, strict=True):
            for group in groups:
                if set(names) & set(group["params"]):
                    _check_fixed({**fixed, **group}, fixed)

    def take_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Take over hyperparameters, and hand learning rates to the kernels."""
        super().take_groups(groups)
        self.apply_learning_rates()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Hand changed learning rates to the kernels, and apply the gradients that are kept for the step.

        Tables with ``update="in_backward"`` were updated in the backward pass.

        Raises:
            UnsupportedError: a guard refuses it: they were in several passes since the last step.
        """
        loss = closure() if closure is not None else None
        self.apply_learning_rates()
        self._engine.events.steps()
        with torch.no_grad():
            for lookup in self._engine.kept:
                lookup.apply()
        return loss

    def init_state(self, sparse_grad_parameter_names: Set[str] | None = None) -> None:
        """Do nothing: kernels have their state from the start."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Hand changed learning rates to the kernels, and drop the gradients that are kept for the step."""
        self.apply_learning_rates()
        self._engine.events.drops()
        for own in self._parameters_of(self._tables):
            own.grad = None

    def apply_learning_rates(self) -> None:
        """Hand changed learning rates to the kernels."""
        for group, fixed in zip(self.param_groups, self._fixed, strict=True):
            _check_fixed(group, fixed)
        rates = [float(group["lr"]) for group in self.param_groups]
        if rates != self._applied:
            self._engine.rates.set(dict(zip(self._specs, rates, strict=True)).get)
            self._applied = rates

    def _columns_of_states(self) -> Mapping[str, Mapping[str, int]]:
        """The states of each table and their columns, as a rank with a block of it knows them; 0 of a number.

        Every rank makes this call: those without a block of a table have entries for its states too.
        """
        own = {name: _columns(table) for name, table in self._tables.items() if table.state.local}
        env = self._meeting.env
        told = env.communicator.all_gather_objects(own) if env.world_size > 1 else [own]
        return {name: next((each[name] for each in told if name in each), {}) for name in self._tables}

    def state_dict(self) -> dict[str, Any]:
        """The state under parameter names, in shared storage; no collective.

        ``torch.distributed.checkpoint.load`` reads into it; :meth:`load_state_dict` of the same dict then takes over
        steps and hyperparameters.

        Returns:
            ``{"state": {parameter name: {state name: tensor}}, "param_groups": [...]}``; groups name parameters.
        """
        shown = {
            name: {entry: self._tables[name].state.shown(value) for entry, value in entries.items()}
            for name, entries in self.states().items()
        }
        # The base class packs the groups; the state it would pack is in the kernels.
        return {**super().state_dict(), "state": shown}

    def states(self) -> dict[str, dict[str, BlockedTensor]]:
        """The states of each parameter that has some, by name, as this rank's blocks of them; no collective."""
        return {name: self._state(name) for name in self._tables if self._columns[name]}

    def _state(self, name: str) -> dict[str, BlockedTensor]:
        table = self._tables[name]
        return {
            entry: table.state.tensor(state_of(table, entry), columns=width, dtype=torch.float32)
            if width
            else table.state.number(_number(table, entry))
            for entry, width in self._columns[name].items()
        }

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check that a state dict of whole tables fits, changing nothing.

        Raises:
            UnknownNameError: it names a parameter that the optimizer does not have.
            InvalidInputError: state is missing, or entries, shapes or groups differ.
            UnsupportedError: a group has other values of what kernels are built with.
        """
        groups = {name: value for name, value in state_dict.items() if name != "state"}
        super().check_state_dict({**groups, "state": {}} if "state" in state_dict else groups)
        given = state_dict["state"]
        check_names(self.params, given)
        for name, table in self._tables.items():
            _check_entries(name, table, given.get(name, {}), self._columns[name])
            if table.row_state:
                self._check_rows(name, given.get(name, {}))

    def _check_rows(self, name: str, given: Mapping[str, Any]) -> None:
        """Check that states of keys have the rows of the model's state dict that was loaded before."""
        table = self._tables[name]
        for entry, own in self._state(name).items():
            if own.dim() and not is_live(given[entry], own):
                needed = table.num_loaded
                if len(given[entry]) != needed:
                    raise InvalidInputError(
                        f"state {entry!r} of {name!r} has {len(given[entry])} rows, but the model's state dict loaded "
                        f"before has {needed}: load both from one checkpoint"
                    )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the state of an unsharded or differently sharded optimizer; every rank makes this call.

        Raises:
            UnknownNameError: it names a parameter that the optimizer does not have.
            InvalidInputError: state is missing, or entries, shapes or groups differ; nothing is changed then.
        """
        with self.loading():
            self.check_state_dict(state_dict)
        for name in self._tables:
            self._take(name, state_dict["state"].get(name, {}))
        if self._saves_param_groups and "param_groups" in state_dict:
            write_groups(self.params, self.param_groups, state_dict["param_groups"])
        self.apply_learning_rates()
        self.post_load_state_dict()

    def loading(self) -> AbstractContextManager[None]:  # noqa: D102 - described in the base class
        meeting = self._meeting
        return meeting.env.together(f"the optimizer's load_state_dict() of {meeting.collection}")

    @torch.no_grad()
    def _take(self, name: str, given: Mapping[str, Any]) -> None:
        """Take over the states of a parameter, whole or in blocks of any layout."""
        table = self._tables[name]
        for entry, own in self._state(name).items():
            value, is_number = given[entry], not own.dim()
            if is_live(value, own) or (not table.row_state and not is_number and copied_blocks(own, value)):
                continue
            if not is_number:
                table.state.scatter(whole_tensor(value), state_of(table, entry), table.loaded_rows)
                continue
            number = own.blocks if copied_blocks(own, value) else [(None, whole_tensor(value))]
            for local in table.state.local:
                table.lookup_of(local).load_step(float(number[0][1]))


def state_of(table: ShardedTable, name: str) -> Callable[[LocalBlock], Tensor]:
    """The function that gives a local block's values of one optimizer state."""
    return lambda local: table.lookup_of(local).optimizer_state(local.index)[name]


def _number(table: ShardedTable, name: str) -> Tensor | None:
    """A state that is one number for all blocks, where a block is here."""
    return torch.tensor(float(state_of(table, name)(table.state.local[0]))) if table.state.local else None


def _columns(table: ShardedTable) -> dict[str, int]:
    """The states of a table with a block here, and their columns; 0 of a number."""
    local, dim = table.state.local[0], table.state.table.embedding_dim
    lookup = table.lookup_of(local)
    widths = {
        name: 1 if name in lookup.states_per_row else dim for name in lookup.optimizer_state(local.index)
    }
    return widths | {name: 0 for name in widths if name == _STEP}


def _check_entries(
    name: str, table: ShardedTable, given: Mapping[str, Any], columns: Mapping[str, int]
) -> None:
    loaded = {entry for entry, value in given.items() if value is not None}
    if loaded != set(columns):
        raise InvalidInputError(
            f"the state of {name!r} has the entries {sorted(columns)}; the state dict has {sorted(loaded)}. "
            "Was it saved by another optimizer?"
        )
    for entry, width in columns.items():
        if width and not table.state.takes(given[entry].shape, width):
            raise InvalidInputError(
                f"state {entry!r} of {name!r} has shape {[table.state.table.num_embeddings, width]}; the state dict "
                f"has {list(given[entry].shape)}"
            )


def _group_of(spec: OptimizerSpec) -> dict[str, Any]:
    """The hyperparameters as the unsharded torch optimizer has them, so that either can load the other's."""
    try:
        group = spec_to_torch(spec, [torch.nn.Parameter(torch.zeros(1, 1))]).param_groups[0]
    except (UnknownNameError, InvalidInputError):  # a plugin's own optimizer
        return {"lr": spec.learning_rate, **dict(spec.parameters)}
    return {name: value for name, value in group.items() if name != "params"}


def _check_fixed(group: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    for name, value in fixed.items():
        given = group[name]
        if (tuple(given) if isinstance(given, list | tuple) else given) != value:
            raise UnsupportedError(
                f"{name} was changed from {value!r} to {given!r}, but kernels are built with it: only learning rates "
                "can change. Shard again with other fused_params"
            )


def _listed(group: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name}={group[name]}" for name in ("lr", "betas", "eps", "weight_decay") if group.get(name)
    )
