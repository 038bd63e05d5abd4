"""One quantised table of a sharded module: this rank's stored rows, and the whole table's state.

Legend: R rows of a table, D its columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import UnsupportedError
from shardwright.modules.quantized.rows import QuantizedRows
from shardwright.planning.tables.quantized import has_header, stored_row_bytes
from shardwright.runtime.sharded.tables.sharded_table import ShardedTable
from shardwright.runtime.sharded.tables.table_state import LocalBlock, is_state_in_blocks, row_index


class ShardedQuantizedTable(ShardedTable):
    """The stored rows of this rank's blocks; a column block has the scale and bias of its whole rows.

    State dicts have the stored rows of the unsharded table, ``[R, bytes]`` uint8: values, scales and biases are
    gathered each by itself.
    """

    def rows_of(self, local: LocalBlock) -> QuantizedRows:
        """The rows of a local block, shared storage."""
        return QuantizedRows(self.state.table.data_type, local.block.num_columns, self.weight_of(local))

    def take(self, whole: QuantizedRows) -> None:
        """Copy the local blocks' parts of a whole table's rows."""
        for local in self.state.local:
            columns = local.block.columns
            own = whole.rows(row_index(local.block)).columns(columns.start, columns.stop)
            self.weight_of(local).copy_(own.packed())

    def gathered(self) -> QuantizedRows:
        """The whole table's rows in host memory; every rank makes this call."""
        table = self.state.table
        dtype = torch.float16 if table.data_type.bits == 16 else torch.uint8

        def values_of(local: LocalBlock) -> Tensor:
            return self.rows_of(local).values.view(dtype)  # communicators know no float8

        values = self.state.gather(values_of, columns=table.embedding_dim, dtype=dtype)
        if not has_header(table.data_type):
            return QuantizedRows.of(table.data_type, values)
        scale, bias = (
            self.state.gather(
                lambda local, name=name: getattr(self.rows_of(local), name),  # type: ignore[misc]
                columns=1,
                dtype=torch.float16,
            )
            for name in ("scale", "bias")
        )
        return QuantizedRows.of(table.data_type, values, scale, bias)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if is_state_in_blocks():
            raise UnsupportedError(
                f"table {self.state.table.describe()} is quantised: its rows are saved whole, by state_dict(), and not "
                "in blocks. Save a checkpoint of the float model, and quantise what is loaded from it"
            )
        destination[prefix + "weight"] = self.gathered().packed()

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
        key, table = prefix + "weight", self.state.table
        unexpected_keys += [name for name in state_dict if name.startswith(prefix) and name != key]
        if key not in state_dict:
            missing_keys.append(key)
            return
        whole = state_dict[key]
        expected = (table.num_embeddings, stored_row_bytes(table.data_type, table.embedding_dim))
        if tuple(whole.shape) != expected or whole.dtype != torch.uint8:
            error_msgs.append(
                f"table {table.describe()}: {key!r} is {whole.dtype} {list(whole.shape)}, not uint8 {list(expected)}"
            )
            return
        with torch.no_grad():
            self.take(QuantizedRows(table.data_type, table.embedding_dim, whole))
