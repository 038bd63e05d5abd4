"""Entries of a checkpoint: what is saved of a model and its optimizers, and where it is loaded to.

Names are ``model.`` and the name in the unsharded model's state dict, and ``optimizer.state.``, a parameter's name and
that of one of its states. Optimizers of any kind go by parameter names.

Legend: R rows, D columns of a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, zip_longest
from typing import Any

from attrs import field, frozen
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.errors import DuplicateNameError, InvalidInputError
from shardwright.optim.combined import leaves_of
from shardwright.optim.keyed import Delegating, KeyedOptimizer
from shardwright.runtime.sharded.collections.sharded_collection import ShardedCollection
from shardwright.runtime.sharded.models.model_parallel import DistributedModelParallel
from shardwright.runtime.sharded.tables.blocked_tensor import (
    PIECE_BYTES,
    BlockedTensor,
    BlockForm,
    Piece,
    own_storage,
)
from shardwright.runtime.sharded.tables.fused_optimizer import FusedOptimizer
from shardwright.runtime.sharded.tables.sharded_table import ShardedTable
from shardwright.runtime.sharded.tables.table_state import LocalBlock
from shardwright_plugins.checkpoint.stored_order import in_stored_order, stored_rows

MODEL, STATE, GROUPS, EXTRA = "model.", "optimizer.state.", "optimizer.param_groups", "extra."
STEP = "step"


@frozen(eq=False)
class NamedTable:
    """A sharded table and the name of its weight in the unsharded model."""

    name: str
    table: ShardedTable

    @property
    def prefix(self) -> str:
        """Prefix of the names of its entries."""
        return self.name.removesuffix("weight")

    @property
    def is_keyed(self) -> bool:
        """True if its ids are keys, so that rows go to the places of their keys."""
        return self.table.state.sharding.layout.row_map.takes_any_id


@frozen(eq=False)
class Held:
    """A parameter of the unsharded model, as an optimizer of the user's has it.

    Args:
        name: its name in the unsharded model.
        blocks: this rank's blocks of it; the whole under ``None``.
        table: the table that it is the weight of, if it is sharded.
    """

    name: str
    blocks: dict[LocalBlock | None, Tensor]
    table: ShardedTable | None = None

    def state(self, states: Mapping[LocalBlock | None, Mapping[str, Any]], entry: str) -> Any:
        """One of its states; of a table as this rank's blocks of it.

        Args:
            states: the states of each block.
            entry: name of the state.
        """
        local, example = next((local, state[entry]) for local, state in states.items())
        if self.table is None or local is None or not isinstance(example, Tensor) or not example.dim():
            return example
        table = self.table.state
        for block in table.local:
            table.check_optimizer_state(block, entry, states[block][entry])
        columns = table.table.embedding_dim if example.shape[1] == local.block.num_columns else 1
        return table.tensor(lambda block: states[block][entry], columns=columns, dtype=example.dtype)


def _many(values: Iterable[Optimizer]) -> tuple[Optimizer, ...]:
    return tuple(values)


@frozen(eq=False, slots=False)
class Trained:
    """A model and its optimizers.

    Args:
        model: sharded or not.
        optimizers: those of the dense rest; the model's fused optimizer belongs to it anyway.

    Raises:
        InvalidInputError: one of them is something else.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer] = field(converter=_many)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise InvalidInputError(f"a checkpoint is of a model, got a {type(self.model).__name__}")
        for optimizer in self.optimizers:
            if not isinstance(optimizer, Optimizer):
                raise InvalidInputError(
                    f"after the model come its optimizers, got a {type(optimizer).__name__}; what else there is goes "
                    "into extra=..."
                )

    @property
    def root(self) -> nn.Module:
        """The module whose state dict it is."""
        return self.model.module if isinstance(self.model, DistributedModelParallel) else self.model

    @cached_property
    def tables(self) -> list[NamedTable]:
        """The sharded tables, in the order of the model."""
        found = self.root.named_modules(remove_duplicate=False)
        return [
            NamedTable(f"{path}.weight" if path else "weight", module)
            for path, module in found
            if isinstance(module, ShardedTable)
        ]

    @cached_property
    def leaves(self) -> list[tuple[str, KeyedOptimizer]]:
        """The optimizers that have state themselves, each with what stands before its parameters' names."""
        fused = getattr(self.model, "fused_optimizer", None)
        given = [*([fused] if isinstance(fused, KeyedOptimizer) else []), *self.optimizers]
        found = {id(leaf): (prefix, leaf) for each in given for prefix, leaf in leaves_of(each)}
        named = dict(self.root.named_parameters())
        return [
            (prefix, leaf if isinstance(leaf, KeyedOptimizer) else _named(leaf, named))
            for prefix, leaf in found.values()
        ]

    @cached_property
    def _table_of_parameter(self) -> dict[int, tuple[NamedTable, LocalBlock | None]]:
        """The table of each parameter and the block that it is, if one; by the parameter's identity."""
        return {
            id(parameter): (named, local)
            for named in self.tables
            for local, parameter in zip_longest(named.table.state.local, named.table.parameters())
        }

    def held(self, prefix: str, leaf: KeyedOptimizer) -> list[Held]:
        """The parameters of an optimizer, but for a fused one, by which no parameter is stored."""
        found: dict[str, Held] = {}
        for name, parameter in () if isinstance(leaf, FusedOptimizer) else leaf.params.items():
            named, local = self._table_of_parameter.get(id(parameter), (None, None))
            if named is None:
                found[name] = Held(prefix + name, {None: parameter})
            elif local is not None:
                found.setdefault(named.name, Held(named.name, {}, named.table)).blocks[local] = parameter
        return list(found.values())

    def names_of(self, prefix: str, leaf: KeyedOptimizer) -> dict[str, str]:
        """The name in the unsharded model of each parameter of an optimizer, by its own."""
        names = {key: named.name for key, (named, _) in self._table_of_parameter.items()}
        fused = isinstance(leaf, FusedOptimizer)
        return {
            name: prefix + name if fused else names.get(id(own), prefix + name)
            for name, own in leaf.params.items()
        }

    def make_one_model(self) -> None:
        """Average replicas of tables that have grown apart; every rank makes this call."""
        for module in self.root.modules():
            if isinstance(module, ShardedCollection):
                module.make_one_model()

    def model_state(self) -> dict[str, Any]:
        """The entries of the model by name, of tables as this rank's blocks; in shared storage, no collective."""
        state = {MODEL + name: value for name, value in self.root.state_dict().items()}
        for named in self.tables:
            state |= {f"{MODEL}{named.prefix}{name}": value for name, value in named.table.entries().items()}
        return state

    def to_save(self) -> dict[str, Any]:
        """Every entry by name, as it is stored; no collective.

        Raises:
            DuplicateNameError: two optimizers have a parameter of one name.
        """
        state = _stored(self.model_state())
        for named in self.tables:
            state |= stored_rows(named.table.state, MODEL + named.name)
        groups: list[dict[str, Any]] = []
        for prefix, leaf in self.leaves:
            for key, value in _stored(dict(self.states(prefix, leaf))).items():
                if key in state:
                    raise DuplicateNameError(f"two optimizers have the state {key!r}")
                state[key] = value
            names = self.names_of(prefix, leaf)
            groups += [
                {**group, "params": sorted({names[name] for name in group["params"]})}
                for group in leaf.state_dict().get("param_groups", ())
            ]
        return {**state, GROUPS: groups}

    def states(self, prefix: str, leaf: KeyedOptimizer) -> Iterator[tuple[str, Any]]:
        """The states that an optimizer has, by name.

        Args:
            prefix: beginning of its parameters' names.
            leaf: the optimizer.
        """
        if isinstance(leaf, FusedOptimizer):
            for name, entries in leaf.states().items():
                yield from ((f"{STATE}{prefix}{name}.{entry}", value) for entry, value in entries.items())
            return
        for held in self.held(prefix, leaf):
            states = {local: leaf.state.get(own, {}) for local, own in held.blocks.items()}
            for entry in next(iter(states.values())):
                yield f"{STATE}{held.name}.{entry}", held.state(states, entry)


def _named(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> KeyedOptimizer:
    """A torch optimizer with its state by the names that its parameters have in the model; shared state and groups."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return Delegating({name: value for name, value in parameters.items() if id(value) in own}, optimizer)


def _stored(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Entries as they are stored: large tensors in pieces of bounded size, rows in their stored order."""
    stored: dict[str, Any] = {}
    for name, value in entries.items():
        state = value.form.memory if isinstance(value, BlockedTensor) else None
        stored |= {name: _in_pieces(value)} if state is None else in_stored_order(state, name, value)
    return stored


def _in_pieces(value: Any) -> Any:
    """A large tensor in pieces, shared storage; what a reader holds beside it is one of them."""
    if type(value) not in (Tensor, nn.Parameter) or value.nbytes <= PIECE_BYTES or not value.is_contiguous():
        return value
    form = BlockForm(lambda values: _cut(values[0]), places=(None,))
    return BlockedTensor(value.shape, value.dtype, value.device, [value.detach()], form)


def _cut(value: Tensor) -> Iterator[Piece]:
    rows = value.split(max(1, PIECE_BYTES * len(value) // value.nbytes))
    starts = accumulate((len(own) for own in rows), initial=0)
    for start, own in zip(starts, rows, strict=False):
        yield Piece((start, *[0] * (own.dim() - 1)), tuple(own.shape), own_storage(own))
