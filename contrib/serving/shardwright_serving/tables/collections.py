"""`QuantEmbeddingBagCollection` and `QuantEmbeddingCollection`: collections of quantized tables, for serving.

Legend: B batch size, D columns of a table or of the output, N ids of a feature, R rows of a table.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    InvalidInputError,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
    ShardwrightError,
    TableCollection,
    TableSpec,
    UnknownNameError,
)
from shardwright_serving.rows.quantized_rows import QuantizedRows, empty_rows
from shardwright_serving.tables.kernel_lookups import KernelLookups

__all__ = [
    "QuantEmbeddingBagCollection",
    "QuantEmbeddingCollection",
    "QuantizedCollection",
    "QuantizedTable",
    "inverse_lengths",
    "output_type_of",
]

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


class QuantEmbeddingBagCollection(QuantizedCollection):
    """`EmbeddingBagCollection` with quantized tables: the same input and output, without gradients.

    Args:
        tables: the tables; the ``data_type`` of each is its precision: INT8, INT4, INT2, FP8 or FP16.
        is_weighted: each id carries a weight, with which its row is multiplied.
        device: device of the rows; on ``"meta"`` they take no memory. They are zeros until rows are set or loaded.
        output_dtype: type of the outputs: FP32, FP16 or BF16. Sums are float32 in any case.

    Raises:
        UnsupportedError: tables cannot be quantized to a ``data_type``.

    Example:
        >>> import torch, shardwright as sw, shardwright_serving
        >>> table = sw.EmbeddingBagConfig(
        ...     num_embeddings=10, embedding_dim=2, name="products", feature_names=["bought"],
        ...     init_fn=torch.nn.init.ones_,
        ... )
        >>> quantized = shardwright_serving.quantize_embeddings(sw.EmbeddingBagCollection([table]), "INT8")
        >>> quantized(sw.KeyedJaggedTensor.from_lists({"bought": [[3, 1], []]}))["bought"]
        tensor([[2., 2.],
                [0., 0.]])
        >>> quantized.quantized_rows("products").packed().shape  # 2 bytes of values, 4 of scale and bias
        torch.Size([10, 6])
    """

    tables_name: ClassVar[str] = "embedding_bags"
    config_type: ClassVar[type[EmbeddingConfig]] = EmbeddingBagConfig

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        output_dtype: DataType | str | torch.dtype = DataType.FP32,
    ) -> None:
        super().__init__(tables, device, output_dtype)
        self._is_weighted, self._bag_configs = is_weighted, list(tables)
        pairs = [(table, feature) for table in tables for feature in table.feature_names]
        dims = [table.embedding_dim for table, _ in pairs]
        self._results = KeyedTensor(self.embedding_names(), dims, torch.empty(0, sum(dims)))
        self._means = [
            (feature, slice(stop - table.embedding_dim, stop))
            for (table, feature), stop in zip(pairs, accumulate(dims), strict=True)
            if table.pooling is PoolingType.MEAN
        ]

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool the rows of each bag; see `EmbeddingBagCollection.forward`."""
        if _is_compiling():
            return _outside_graph(self, features)
        lookups = self._kernel_lookups()
        if lookups is not None and lookups.take(features):
            sums = self._asked(features, lookups.pooled)
            return self._results.with_values(self._divided(sums, features))
        return self._by_torch(features)

    @torch.no_grad()
    def _by_torch(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """The outputs by plain torch, feature by feature."""
        pooled = self.pooled_by(self._pooled, features)
        return KeyedTensor(
            keys=self.embedding_names(),
            length_per_key=[columns.shape[1] for columns in pooled],
            values=torch.cat(pooled, dim=1).to(self.output_dtype),
        )

    def _divided(self, sums: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """Sums of all outputs, of which those that are means are divided, in the type of the outputs."""
        if self._means:
            keys = features.keys()
            lengths = features.lengths().view(len(keys), features.stride())
            for feature, columns in self._means:
                sums[:, columns] *= inverse_lengths(lengths[keys.index(feature)])
        return sums.to(self.output_dtype)

    def _pooled(
        self, table: EmbeddingBagConfig, ids: Tensor, offsets: Tensor, weights: Tensor | None
    ) -> Tensor:
        rows = self.quantized_rows(table.name).rows(ids.long()).dequantized()
        sums = functional.embedding_bag(
            torch.arange(rows.shape[0], device=rows.device),
            rows,
            offsets.long(),
            mode="sum",
            per_sample_weights=weights,
            include_last_offset=True,
        )
        if table.pooling is PoolingType.SUM:
            return sums
        return sums * inverse_lengths(offsets.diff())

    def of_tables(
        self, tables: Sequence[Any], device: torch.device | str | None = None
    ) -> QuantizedCollection:
        """See :meth:`QuantizedCollection.of_tables`."""
        return QuantEmbeddingBagCollection(tables, self._is_weighted, device, output_dtype=self.output_dtype)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables' configurations, in order."""
        return self._bag_configs

    def is_weighted(self) -> bool:
        """True if each id must carry a weight."""
        return self._is_weighted


class QuantEmbeddingCollection(QuantizedCollection):
    """`EmbeddingCollection` with quantized tables: the same input and output, without gradients.

    Args:
        tables: the tables; the ``data_type`` of each is its precision: INT8, INT4, INT2, FP8 or FP16.
        device: device of the rows; on ``"meta"`` they take no memory. They are zeros until rows are set or loaded.
        need_indices: return the ids as well, as the weights of the outputs.
        output_dtype: type of the outputs: FP32, FP16 or BF16.

    Raises:
        UnsupportedError: tables cannot be quantized to a ``data_type``.
    """

    tables_name: ClassVar[str] = "embeddings"
    config_type: ClassVar[type[EmbeddingConfig]] = EmbeddingConfig

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        *,
        output_dtype: DataType | str | torch.dtype = DataType.FP32,
    ) -> None:
        super().__init__(tables, device, output_dtype)
        self._need_indices = need_indices

    @torch.no_grad()
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up each id; see `EmbeddingCollection.forward`."""
        if _is_compiling():
            return _outside_graph(self, features)
        lookups = self._kernel_lookups()
        if lookups is not None and lookups.take(features):
            found = self._asked(features, lookups.rows)
        else:
            found = [
                (bags, self.quantized_rows(table.name).rows(bags.values().long()).dequantized())
                for table, _, bags in self.bags_of(features)
            ]
        return {
            name: JaggedTensor(
                values=rows.to(self.output_dtype),
                lengths=bags.lengths(),
                weights=bags.values() if self._need_indices else None,
            )
            for name, (bags, rows) in zip(self.embedding_names(), found, strict=True)
        }

    def of_tables(
        self, tables: Sequence[Any], device: torch.device | str | None = None
    ) -> QuantizedCollection:
        """See :meth:`QuantizedCollection.of_tables`."""
        return QuantEmbeddingCollection(tables, device, self._need_indices, output_dtype=self.output_dtype)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables' configurations, in order."""
        return self._tables

    def need_indices(self) -> bool:
        """True if outputs carry the ids as their weights."""
        return self._need_indices

    def is_weighted(self) -> bool:
        """False: sequences have no sums."""
        return False


def _is_compiling() -> bool:
    """True inside ``torch.compile``, whose graphs break at a collection; exported programs have its operators."""
    return torch.compiler.is_compiling() and not torch.compiler.is_exporting()


def _call(collection: nn.Module, features: KeyedJaggedTensor) -> Any:
    return collection(features)


# torch.compiler.disable does the same, but imports torch's compiler at once, which takes seconds.
_outside_graph: Callable[[nn.Module, KeyedJaggedTensor], Any] = torch._disable_dynamo(_call)  # type: ignore[attr-defined]


def inverse_lengths(lengths: Tensor) -> Tensor:
    """Factor of each bag's sum that makes it a mean, ``[B, 1]``: multiplied as sharded collections do it."""
    return lengths.clamp(min=1).float().reciprocal().unsqueeze(1)


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
