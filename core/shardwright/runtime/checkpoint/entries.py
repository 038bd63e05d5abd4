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
from shardwright.optim.keyed import KeyedOptimizer, named_optimizer
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
            (prefix, leaf if isinstance(leaf, KeyedOptimizer) else named_optimizer(leaf, named))
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

    def blocks_under(self, leaf: KeyedOptimizer) -> dict[NamedTable, dict[LocalBlock, Tensor]]:
        """The parameters of an optimizer that are blocks of tables: whose optimizer is the user's own."""
        found: dict[NamedTable, dict[LocalBlock, Tensor]] = {}
        for parameter in () if isinstance(leaf, FusedOptimizer) else leaf.params.values():
            named, local = self._table_of_parameter.get(id(parameter), (None, None))
            if named is not None and local is not None:
                found.setdefault(named, {})[local] = parameter
        return found

    def dense_under(self, prefix: str, leaf: KeyedOptimizer) -> dict[str, Tensor]:
        """The other parameters of an optimizer, by their names in the model."""
        if isinstance(leaf, FusedOptimizer):
            return {}
        return {
            prefix + name: parameter
            for name, parameter in leaf.params.items()
            if id(parameter) not in self._table_of_parameter
        }

    def names_of(self, prefix: str, leaf: KeyedOptimizer) -> dict[str, str]:
        """The name in the unsharded model of each parameter of an optimizer, by its own."""
        names = {key: named.name for key, (named, _) in self._table_of_parameter.items()}
        fused = isinstance(leaf, FusedOptimizer)
        return {
            name: prefix + name if fused else names.get(id(own), prefix + name)
            for name, own in leaf.params.items()
        }

    def parameter_names(self, prefix: str, leaf: KeyedOptimizer) -> dict[int, str]:
        """Names of the parameters in the checkpoint, by the parameters' identities."""
        names = self.names_of(prefix, leaf)
        return {id(parameter): names[name] for name, parameter in leaf.params.items()}

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
            state |= named.table.state.stored_rows(MODEL + named.name)
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
        for name, parameter in self.dense_under(prefix, leaf).items():
            for entry, value in leaf.state.get(parameter, {}).items():
                yield f"{STATE}{name}.{entry}", value
        for named, blocks in self.blocks_under(leaf).items():
            yield from _states_of_blocks(
                named, {local: leaf.state.get(own, {}) for local, own in blocks.items()}
            )


def _stored(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Entries as they are stored: large tensors in pieces of bounded size, rows in their stored order."""
    stored: dict[str, Any] = {}
    for name, value in entries.items():
        state = value.form.memory if isinstance(value, BlockedTensor) else None
        stored |= {name: _in_pieces(value)} if state is None else state.in_stored_order(name, value)
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


def _states_of_blocks(
    named: NamedTable, states: Mapping[LocalBlock, Mapping[str, Any]]
) -> Iterator[tuple[str, Any]]:
    """States that an optimizer of the user's has of the blocks of one table, as those of the table."""
    for entry, example in next(iter(states.values())).items():
        key = f"{STATE}{named.name}.{entry}"
        if not isinstance(example, Tensor) or not example.dim():
            yield key, example
            continue
        dim = named.table.state.table.embedding_dim
        for local, state in states.items():
            named.table.state.check_optimizer_state(local, entry, state[entry])
        columns = dim if example.shape[1] == next(iter(states)).block.num_columns else 1
        yield (
            key,
            named.table.state.tensor(
                lambda local, entry=entry: states[local][entry],  # type: ignore[misc]
                columns=columns,
                dtype=example.dtype,
            ),
        )
