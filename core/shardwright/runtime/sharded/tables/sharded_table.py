"""One table of a sharded module: this rank's blocks, and the whole table's state."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import evolve
from torch import Tensor, nn

from shardwright.contracts.lookup import Lookup, RowIndex
from shardwright.errors import UnsupportedError
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.sharded.tables.blocked_tensor import (
    BlockedTensor,
    copied_blocks,
    is_live,
    whole_tensor,
)
from shardwright.runtime.sharded.tables.shard_gradients import Part
from shardwright.runtime.sharded.tables.sharded_parameter import ShardedParameter
from shardwright.runtime.sharded.tables.table_state import LocalBlock, TableState
from shardwright.runtime.step.backward.kept_gradients import KeptGradients, is_updated_in_step
from shardwright.runtime.step.engine import CollectionEngine
from shardwright.runtime.step.kernel_groups import is_updated_in_backward, kernel_of
from shardwright.runtime.step.step_events import StepEvents


class ShardedTable(nn.Module):
    """This rank's blocks of one table, under the unsharded table's place in the module.

    ``weight`` is the local block ``[rows, columns]``; further ones, if a rank has several, are ``weight_1``, ... A rank
    with fewer than another has empty ones, by which it takes part in norms and refusals over all ranks.
    Parameters that a kernel updates by itself carry ``_in_backward_optimizers``.

    Attributes:
        is_fused: its kernel runs the optimizer, in the backward pass or in ``optimizer.step()``.
        in_step: its kernel runs it in ``optimizer.step()``.
        row_state: names of what the indexes of its blocks know of each row; none where ids are rows.
    """

    def __init__(
        self, state: TableState, lookups: Sequence[Lookup], env: ShardingEnv, events: StepEvents
    ) -> None:
        super().__init__()
        self.state, self.is_fused = state, is_updated_in_backward(state.table, state.sharding)
        self.in_step = is_updated_in_step(state.table, state.sharding)
        self._lookups = lookups
        # Of each block, the row of the loaded table that each of its rows was, and its key then.
        self._loaded: dict[LocalBlock, tuple[Tensor, Tensor]] | None = {}
        self._rows_loaded = state.table.num_embeddings
        update = state.table.update if self.is_fused else ""
        self._part = Part(state.table.describe(), env, events, state.cut_dims, update)
        self.row_state = kernel_of(state.sharding.compute_kernel).row_state
        # What state dicts have is an attribute on every rank: torch.distributed.checkpoint looks for each key.
        self.register_parameter("weight", None)
        for name in self.row_state:
            if not hasattr(self, name):
                self.register_buffer(name, None)
        is_sharded = not state.table.is_frozen and (self.is_fused or state.is_parted)
        parameters = [self._block_parameter(local, is_sharded=is_sharded) for local in state.local]
        if is_sharded:
            parameters += [self._idle_parameter() for _ in range(state.most_blocks - len(parameters))]
        for number, parameter in enumerate(parameters):
            self.register_parameter(f"weight_{number}" if number else "weight", parameter)
            if number:  # so does it leave out what they do not have
                self._non_persistent_buffers_set.add(f"weight_{number}")
        if self.is_fused and parameters:
            parameters[0].further_blocks = parameters[1:]  # type: ignore[attr-defined]  # keyed optimizers ask

    def _block_parameter(self, local: LocalBlock, *, is_sharded: bool) -> nn.Parameter:
        """The parameter of a local block."""
        lookup = self.lookup_of(local)
        own = lookup.parameters()
        if own:
            parameter = own[local.index]
        else:
            parameter = nn.Parameter(lookup.weight(local.index), requires_grad=not self.state.table.is_frozen)
            parameter._in_backward_optimizers = [lookup]  # type: ignore[attr-defined]  # as torch marks them
        if self.state.table.is_frozen:
            parameter.requires_grad_(False)
        if not is_sharded:
            return parameter
        is_copied = self.state.sharding.layout.dataflow_of(local.block).is_replicated
        num_copies = self.state.communicator.world_size if is_copied else 1
        kept = lookup if isinstance(lookup, KeptGradients) else None
        return ShardedParameter.of(
            parameter, evolve(self._part, num_copies=num_copies, kept=kept, block=local.index)
        )

    def _idle_parameter(self) -> nn.Parameter:
        """An empty parameter in the place of a block that another rank has."""
        state = self.state
        dtype = torch.float32 if self.is_fused else state.dtype  # in which gradients come
        empty = nn.Parameter(torch.empty(0, state.table.embedding_dim, dtype=dtype, device=state.device))
        if self.is_fused:
            empty._in_backward_optimizers = []  # type: ignore[attr-defined]
        return ShardedParameter.of(empty, evolve(self._part, is_idle=True))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_parameters", ()):
            raise UnsupportedError(
                f"table {self.state.table.describe()} is sharded already, and {name!r} is this rank's block of it, "
                "which no other parameter can replace: neither by hand, nor by fully_shard, which would take blocks "
                "for copies. Build the model with DistributedModelParallel(..., init_data_parallel=False) and give "
                "fully_shard its dense modules, fully_shard(model.module.over), or the parameters of tables as "
                "ignored_params"
            )
        super().__setattr__(name, value)

    def representative(self) -> Tensor:
        """This rank's weights of the table, or an empty parameter where it has none; for optimizers."""
        return next(iter(self.parameters()))

    @property
    def block_parameters(self) -> list[nn.Parameter]:
        """The parameter of each local block."""
        return list(self.parameters())[: len(self.state.local)]

    def weight_of(self, local: LocalBlock) -> Tensor:
        """The weights of a local block, shared storage."""
        return self.lookup_of(local).weight(local.index)

    def lookup_of(self, local: LocalBlock) -> Lookup:
        """The lookup of a local block."""
        return self._lookups[local.lookup]

    def index_of(self, local: LocalBlock) -> RowIndex:
        """The index that finds the rows of a local block's keys."""
        return self.lookup_of(local).row_index(local.index)

    def forget_loaded_rows(self) -> None:
        """Note that the rows of keys here are not those of a table that was loaded whole."""
        self._loaded = None

    @property
    def num_loaded(self) -> int:
        """Rows of the table that was loaded last; of its own if none was. Raises as :meth:`loaded_rows`."""
        self._check_loaded()
        return self._rows_loaded

    def loaded_rows(self, local: LocalBlock) -> Tensor | None:
        """Rows of a block in the table that was loaded last, -1 for a key of later; ``None`` if its row map has them.

        Raises:
            UnsupportedError: they were loaded from a checkpoint in shards, of which this rank has read a part, or came
                from another plan.
        """
        loaded = self._check_loaded()
        if local not in loaded:
            return None
        source, keys = loaded[local]
        return source.where(self._keys_of(local).to(keys.device) == keys, -1)

    def _check_loaded(self) -> dict[LocalBlock, tuple[Tensor, Tensor]]:
        if self._loaded is None:
            raise UnsupportedError(
                f"table {self.state.table.describe()}: its rows were loaded by load_checkpoint() or moved by "
                "reshard(), and optimizer state with them. To load a state dict of the optimizer, load one of the "
                "model first"
            )
        return self._loaded

    def _keys_of(self, local: LocalBlock) -> Tensor:
        return self.index_of(local).state()[self.row_state[0]].flatten()

    def extra_repr(self) -> str:
        """Sharding type, kernel and the blocks here."""
        sharding, table = self.state.sharding, self.state.table
        blocks = ", ".join(
            f"{block.block.num_rows} x {block.block.num_columns}" for block in self.state.local
        )
        return (
            f"{table.num_embeddings} x {table.embedding_dim}, {sharding.sharding_type}, {sharding.compute_kernel}, "
            f"here: {blocks or 'nothing'}"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedTable:
        # Blocks stay where the plan put them; to(), cuda() and half() of a model must not tear them from the kernels.
        cast = fn(torch.empty(0, dtype=torch.float32)).dtype
        if cast != torch.float32:
            warnings.warn(
                f"sharded tables keep the data type of their plan and give float32, where the model is cast to {cast}: "
                "use torch.autocast, cast the collection's values() in the model, or give tables a data_type",
                stacklevel=2,
            )
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination.update({prefix + name: self.state.shown(value) for name, value in self.entries().items()})

    def entries(self) -> dict[str, BlockedTensor]:
        """The entries of the state dict by name, as this rank's blocks of them."""
        row_state = {
            name: self.state.tensor(
                lambda local, name=name: self.index_of(local).state()[name],  # type: ignore[misc]
                columns=1,
                dtype=torch.int64,
            )
            for name in self.row_state
        }
        return {"weight": self.state.rows(self.weight_of), **row_state}

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        wanted = ["weight", *self.row_state]
        known = [prefix + name for name in wanted]
        unexpected_keys += [name for name in state_dict if name.startswith(prefix) and name not in known]
        missing = [name for name in known if name not in state_dict]
        missing_keys += missing
        if missing:
            return
        given = {name: state_dict[prefix + name] for name in wanted}
        weight, width = given["weight"], self.state.row_width
        if not self.state.takes(weight.shape, width) or not (
            self.state.is_float or weight.dtype is self.state.dtype
        ):
            error_msgs.append(
                f"table {self.state.table.describe()}: {prefix + 'weight'!r} is {weight.dtype} {list(weight.shape)}, "
                f"not {self.state.dtype} {[self.state.table.num_embeddings, width]}"
            )
            return
        wrong = [name for name in self.row_state if tuple(given[name].shape) != (len(weight), 1)]
        if wrong:
            error_msgs.append(
                f"table {self.state.table.describe()}: {prefix + wrong[0]!r} is {list(given[wrong[0]].shape)}, and "
                f"{prefix + 'weight'!r} has {len(weight)} rows: load both from one state dict"
            )
            return
        self._take(given)

    @torch.no_grad()
    def _take(self, given: Mapping[str, Tensor]) -> None:
        """Take over the entries of a state dict, whole or in blocks of any layout."""
        own = self.state.rows(self.weight_of)
        if is_live(given["weight"], own) or (not self.row_state and copied_blocks(own, given["weight"])):
            return
        tables = {name: whole_tensor(value) for name, value in given.items()}
        self._loaded, self._rows_loaded = {}, len(tables["weight"])
        for local in self.state.local if self.row_state else ():
            parts = local.block.rows.row_map.part_of(tables[self.row_state[0]].flatten())
            mine = (parts == local.block.rows.index).nonzero().flatten()
            source = self.index_of(local).load({name: tables[name][mine] for name in self.row_state})
            self._loaded[local] = (
                torch.cat([mine, mine.new_tensor([-1])])[source],
                self._keys_of(local).to(source.device, copy=True),
            )
        self.state.scatter_rows(tables["weight"], self.weight_of, self.loaded_rows)


def local_blocks(engine: CollectionEngine) -> dict[str, list[LocalBlock]]:
    """This rank's blocks of each table that has some here."""
    local: dict[str, list[LocalBlock]] = {}
    for lookup, group in enumerate(engine.groups):
        for index, spec in enumerate(group.blocks):
            local.setdefault(spec.table.name, []).append(LocalBlock(spec.block, index, lookup))
    # The order of a table's blocks is the same whatever groups they are in.
    return {
        name: sorted(blocks, key=lambda own: (own.block.rows.index, own.block.columns.start))
        for name, blocks in local.items()
    }
