"""One table of a sharded module: this rank's blocks, and the whole table's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.contracts.lookup import Lookup
from shardwright.modules.embedding_configs import dtype_of
from shardwright.runtime.sharded.sharded_parameter import ShardedParameter
from shardwright.runtime.sharded.table_state import LocalBlock, TableState
from shardwright.runtime.step.kernel_groups import is_updated_in_backward, kernel_of


class ShardedTable(nn.Module):
    """This rank's blocks of one table, under the unsharded table's place in the module.

    ``weight`` is the local block ``[rows, columns]``; further ones, if a rank has several, are ``weight_1``, ...
    Parameters that a kernel updates by itself carry ``_in_backward_optimizers``.

    Attributes:
        is_fused: its kernel runs the optimizer, in the backward pass.
    """

    def __init__(self, state: TableState, lookups: Sequence[Lookup]) -> None:
        super().__init__()
        self.state, self.is_fused = state, is_updated_in_backward(state.table, state.sharding)
        self._lookups = lookups
        self._row_state = kernel_of(state.sharding.compute_kernel).row_state
        # What state dicts have is an attribute on every rank: torch.distributed.checkpoint looks for each key.
        self.register_parameter("weight", None)
        for name in self._row_state:
            if not hasattr(self, name):
                self.register_buffer(name, None)
        for number, local in enumerate(state.local):
            lookup = self._lookups[local.lookup]
            parameters = lookup.parameters()
            parameter = parameters[local.index] if parameters else nn.Parameter(lookup.weight(local.index))
            if not parameters:
                parameter._in_backward_optimizers = [lookup]  # type: ignore[attr-defined]  # as torch marks them
            if self.is_fused or state.is_parted:
                ShardedParameter.of(parameter, state.table.describe(), is_fused=self.is_fused)
            self.register_parameter(f"weight_{number}" if number else "weight", parameter)
            if number:  # so does it leave out what they do not have
                self._non_persistent_buffers_set.add(f"weight_{number}")

    @property
    def keeps_rows(self) -> bool:
        """Whether the kernel says which ids its rows are of, beside their weights."""
        return bool(self._row_state)

    def weight_of(self, local: LocalBlock) -> Tensor:
        """The weights of a local block, shared storage."""
        return self.lookup_of(local).weight(local.index)

    def lookup_of(self, local: LocalBlock) -> Lookup:
        """What looks a local block up."""
        return self._lookups[local.lookup]

    def loaded_rows(self, local: LocalBlock) -> Tensor | None:
        """Which rows of the table that was loaded last a block's rows are, where its row map does not say."""
        return self.lookup_of(local).loaded_rows(local.index)

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
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        table = self.state.table
        dtype = dtype_of(table.data_type)
        destination[prefix + "weight"] = self.state.gather(
            self.weight_of, columns=table.embedding_dim, dtype=dtype
        )
        for name in self._row_state:

            def values(local: LocalBlock, name: str = name) -> Tensor:
                return self.lookup_of(local).row_state(local.index)[name]

            destination[prefix + name] = self.state.gather(values, columns=1, dtype=torch.int64)

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
        key = prefix + "weight"
        wanted = [key, *(prefix + name for name in self._row_state)]
        unexpected_keys += [name for name in state_dict if name.startswith(prefix) and name not in wanted]
        missing = [name for name in wanted if name not in state_dict]
        missing_keys += missing
        if missing:
            return
        whole = state_dict[key]
        expected = (self.state.table.num_embeddings, self.state.table.embedding_dim)
        if tuple(whole.shape) != expected:
            error_msgs.append(
                f"table {self.state.table.describe()}: {key!r} has shape {list(whole.shape)}, not {list(expected)}"
            )
            return
        row_state = {name: state_dict[prefix + name] for name in self._row_state}
        if row_state:
            for local in self.state.local:
                self.lookup_of(local).load_rows(local.index, row_state)
        self.state.scatter(whole, self.weight_of, self.loaded_rows)
