"""The common part of collections of quantized tables: rows in buffers, and the kernels that look them up."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from shardwright import (
    DataType,
    EmbeddingConfig,
    InvalidInputError,
    KeyedJaggedTensor,
    ShardwrightError,
    TableCollection,
    TableSpec,
    UnknownNameError,
)
from shardwright_serving.rows.quantized_rows import QuantizedRows, empty_rows
from shardwright_serving.tables.kernel_lookups import KernelLookups

_Found = TypeVar("_Found")


class QuantizedTable(nn.Module):
    """The rows of one table, as a buffer under the name that the float table's weights have.

    Args:
        rows: its rows.
    """

    weight: Tensor

    def __init__(self, rows: QuantizedRows) -> None:
        super().__init__()
        self.data_type, self.num_columns = rows.data_type, rows.num_columns
        self.register_buffer("weight", rows.packed())

    @property
    def rows(self) -> QuantizedRows:
        """The rows in the buffer."""
        return QuantizedRows(self.data_type, self.num_columns, self.weight)

    def extra_repr(self) -> str:
        """Rows, columns and precision, for printing a model."""
        return f"{self.weight.shape[0]} x {self.num_columns} {self.data_type}"


class QuantizedCollection(TableCollection):
    """The common part of collections of quantized tables; ``data_type`` of a configuration is the rows' precision.

    Args:
        tables: configurations of the tables.
        device: device of the rows.
        output_dtype: type of the outputs: FP32, FP16 or BF16.
    """

    tables_name: ClassVar[str]
    """Attribute that holds the tables, part of the state-dict keys: that of the float collection."""
    config_type: ClassVar[type[EmbeddingConfig]]
    """Class of the tables' configurations."""

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None,
        output_dtype: DataType | str | torch.dtype,
    ) -> None:
        super().__init__(tables, self.config_type)
        self._tables, self._output_type = list(tables), output_type_of(output_dtype)
        made = {
            table.name: QuantizedTable(
                empty_rows(table.data_type, table.num_embeddings, table.embedding_dim, device)
            )
            for table in tables
        }
        self.add_module(self.tables_name, nn.ModuleDict(made))
        self._kernel: str | Mapping[str, str] | None = None
        self._lookups: tuple[list[Tensor], KernelLookups | None] | None = None

    def use_kernel(self, name: str | Mapping[str, str] | None) -> None:
        """Have the tables looked up by the compute kernel of that name; ``None``: by the preferred, as at first.

        Args:
            name: name of the kernel; or table name -> that of its own, where other tables are for the preferred.

        Raises:
            UnknownPluginError: there is no such kernel.
            UnsupportedError: it does not serve the tables on their device.
        """
        before, self._kernel, self._lookups = self._kernel, name, None
        try:
            self._kernel_lookups()
        except ShardwrightError:
            self._kernel = before
            raise

    def __getstate__(self) -> dict[str, Any]:
        """The module without what reads its rows: a copy reads its own."""
        return {**self.__dict__, "_lookups": None, "_known_buffers": None}

    def __prepare_scriptable__(self) -> nn.Module:
        """The module that `torch.jit.script` compiles in the place of this one."""
        from shardwright_serving.scripting.quantized import scriptable  # asked for by few

        return scriptable(self, self._tables, self.quantized_rows)

    def _kernel_lookups(self) -> KernelLookups | None:
        """Kernels' lookups of the rows that there are now; ``None`` where plain torch is to look them up.

        Programs that are exported get plain torch, whose operators every runtime has.
        """
        if torch.compiler.is_compiling() or torch.compiler.is_exporting():
            return None
        # Buffers are read past the module's attributes, which cost more than the lookup of a small batch.
        held = [buffers["weight"] for buffers in self._buffers_of_tables]
        if self._lookups is None or any(map(operator.is_not, held, self._lookups[0])):
            self._lookups = self._made(held)
        return self._lookups[1]

    @property
    def _buffers_of_tables(self) -> list[dict[str, Any]]:
        found = self.__dict__.get("_known_buffers")
        if found is None:
            found = self.__dict__["_known_buffers"] = [table._buffers for table in self._held]
        return found

    def _made(self, held: list[Tensor]) -> tuple[list[Tensor], KernelLookups | None]:
        if held[0].is_meta:
            return held, None
        specs = [
            TableSpec.from_config(table, is_weighted=self.is_weighted(), is_frozen=True)
            for table in self._tables
        ]
        asked = self._kernel
        kernels = [asked.get(spec.name) if isinstance(asked, Mapping) else asked for spec in specs]
        lookups = KernelLookups.of(specs, held, kernels)
        if lookups is None:
            return held, None
        for table, stored in zip(self._held, lookups.stored, strict=True):
            table.weight = stored
        return lookups.stored, lookups

    def _asked(self, features: KeyedJaggedTensor, look_up: Callable[[KeyedJaggedTensor], _Found]) -> _Found:
        """Results of kernels; ids that are no rows raise with the names of feature and table."""
        assert self._lookups is not None  # made for this batch
        lookups = self._lookups[1]
        if lookups is None or not lookups.checks_ids:
            self.bags_of(features)
            return look_up(features)
        try:
            return look_up(features)
        except IndexError:
            self.bags_of(features)
            raise

    @property
    def _held(self) -> list[QuantizedTable]:
        return list(getattr(self, self.tables_name).values())

    @property
    def tables(self) -> Sequence[EmbeddingConfig]:
        """The tables' configurations, in order."""
        return self._tables

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self._table(self._tables[0].name).weight.device

    @property
    def output_dtype(self) -> torch.dtype:  # type: ignore[override]  # what it is was asked for
        """Dtype of the outputs."""
        return _OUTPUTS[self._output_type]

    def table_weight(self, table: str) -> Tensor:
        """The stored rows of the table of that name, in shared storage."""
        return self._table(table).weight

    def quantized_rows(self, table: str) -> QuantizedRows:
        """The rows of a table, in shared storage.

        Raises:
            UnknownNameError: there is no such table.
        """
        return self._table(table).rows

    def set_rows(self, table: str, rows: QuantizedRows) -> None:
        """Put rows in the place of a table's, without a copy.

        Args:
            table: name of the table.
            rows: its rows, as `quantize_rows` gives them.

        Raises:
            UnknownNameError: there is no such table.
            InvalidInputError: they are of another precision or shape, or no `QuantizedRows`.
        """
        if not isinstance(rows, QuantizedRows):
            raise InvalidInputError(
                f"set_rows({table!r}, ...) takes QuantizedRows, got a {type(rows).__name__}: of a weight "
                f"[rows, columns] quantize_rows(weight, {self._table(table).data_type.value!r}) makes them"
            )
        own, given = self._table(table), rows.packed()
        wanted = (own.data_type, own.num_columns, own.weight.shape)
        if (rows.data_type, rows.num_columns, given.shape) != wanted:
            raise InvalidInputError(
                f"table {table!r} has {own.weight.shape[0]} rows of {own.num_columns} {own.data_type} columns, "
                f"got {rows.num_rows} rows of {rows.num_columns} {rows.data_type} columns"
            )
        own.weight = given

    def _table(self, name: str) -> QuantizedTable:
        tables = getattr(self, self.tables_name)
        if name not in tables:
            raise UnknownNameError(
                f"there is no table {name!r} in this {type(self).__name__}, but {', '.join(tables)}"
            )
        made = tables[name]
        assert isinstance(made, QuantizedTable)
        return made

    @abstractmethod
    def of_tables(
        self, tables: Sequence[Any], device: torch.device | str | None = None
    ) -> QuantizedCollection:
        """A collection of other tables, with the settings of this one; its rows are zeros."""


_OUTPUTS: Mapping[str, torch.dtype] = {
    "FP32": torch.float32,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
}


def output_type_of(output_dtype: DataType | str | torch.dtype) -> DataType:
    """The type of outputs that is asked for.

    Raises:
        InvalidInputError: outputs cannot be of that type.
    """
    by_dtype = {dtype: name for name, dtype in _OUTPUTS.items()}
    if isinstance(output_dtype, torch.dtype):
        found = by_dtype.get(output_dtype)
    else:
        found = next(
            (name for name in _OUTPUTS if name == str(getattr(output_dtype, "value", output_dtype)).upper()),
            None,
        )
    if found is None:
        raise InvalidInputError(
            f"outputs of quantized tables cannot be {output_dtype!r}; possible: {', '.join(_OUTPUTS)}"
        )
    return DataType(found)
