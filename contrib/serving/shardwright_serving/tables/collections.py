"""`QuantEmbeddingBagCollection` and `QuantEmbeddingCollection`: collections of quantized tables, for serving.

Legend: B batch size, D columns of a table or of the output, N ids of a feature, R rows of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
)
from shardwright_serving.tables.quantized_collection import (
    QuantizedCollection,
    QuantizedTable,
    output_type_of,
)

__all__ = [
    "QuantEmbeddingBagCollection",
    "QuantEmbeddingCollection",
    "QuantizedCollection",
    "QuantizedTable",
    "inverse_lengths",
    "output_type_of",
]


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
    # Of torch 2.11, torch.compiler.is_exporting() is true there as well; torch.export traces without dynamo.
    return torch.compiler.is_dynamo_compiling()


def _call(collection: nn.Module, features: KeyedJaggedTensor) -> Any:
    return collection(features)


# torch.compiler.disable does the same, but imports torch's compiler at once, which takes seconds.
_outside_graph: Callable[[nn.Module, KeyedJaggedTensor], Any] = torch._disable_dynamo(_call)  # type: ignore[attr-defined]


def inverse_lengths(lengths: Tensor) -> Tensor:
    """Factor of each bag's sum that makes it a mean, ``[B, 1]``: multiplied as sharded collections do it."""
    return lengths.clamp(min=1).float().reciprocal().unsqueeze(1)
