"""Quantized collections in TorchScript.

`torch.jit.script` asks a module for what it compiles (``__prepare_scriptable__``): here a module of whole tables, whose
rows are in the layouts of torch's operators. Batches and results are the types of
`shardwright_serving.scripting.script_functions`.

TorchScript reads annotations, so they are no text here.

Legend: F features, B samples, N ids, D columns of a table.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwright import EmbeddingConfig, JaggedTensor, KeyedJaggedTensor, KeyedTensor, PoolingType
from shardwright_serving.rows.quantized_rows import QuantizedRows
from shardwright_serving.rows.torch_rows import look_up, sum_bags, torch_rows
from shardwright_serving.scripting.script_classes import register_script_types


class ScriptedTable(nn.Module):
    """The lookups of one table.

    Args:
        config: its configuration, with the precision of its rows.
        rows: its rows.
        is_weighted: ids carry weights.
        known: the sorted ids that have rows and the row of each, ``[K]`` int64; ``None`` if ids are rows.
    """

    weight: Tensor
    known: Tensor
    row_of_known: Tensor

    def __init__(
        self,
        config: EmbeddingConfig,
        rows: QuantizedRows,
        is_weighted: bool,
        known: tuple[Tensor, Tensor] | None = None,
    ):
        super().__init__()
        self.features: list[str] = list(config.feature_names)
        self.data_type: str = rows.data_type.value
        self.num_columns: int = rows.num_columns
        self.is_mean: bool = getattr(config, "pooling", None) is PoolingType.MEAN
        self.is_weighted: bool = is_weighted
        self.register_buffer("weight", torch_rows(rows))
        self.has_known: bool = known is not None
        ids, places = known or (torch.zeros(0).long(), torch.zeros(0).long())
        self.register_buffer("known", ids)
        self.register_buffer("row_of_known", places)

    def _rows_of_ids(self, ids: Tensor) -> Tensor:
        """Number of each id's row: ``[N]`` int64; the last, of zeros, for an id that has none."""
        assert not ids.is_floating_point(), "ids are floats: convert them, .long()"
        found = ids.long()
        if not self.has_known:
            return found
        last = self.known.numel()
        if last == 0:
            return torch.zeros_like(found)
        place = torch.searchsorted(self.known, found).clamp(max=last - 1)
        none = torch.full_like(found, last)
        return torch.where(self.known[place] == found, self.row_of_known[place], none)

    def forward(self, ids: Tensor, offsets: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
        """Pool the bags of one feature: ``[B, D]``."""
        rows = self._rows_of_ids(ids)
        sums = sum_bags(self.data_type, self.num_columns, self.weight, rows, offsets.long(), weights)
        if self.is_mean:
            return sums / lengths.clamp(min=1).unsqueeze(1)
        return sums

    @torch.jit.export
    def rows_of(self, ids: Tensor) -> Tensor:
        """Look up ids: ``[N, D]``."""
        return look_up(self.data_type, self.num_columns, self.weight, self._rows_of_ids(ids))


class ScriptedBags(nn.Module):
    """A collection of pooled tables for TorchScript."""

    def __init__(self, tables: list[nn.Module], names: list[str], dims: list[int], output_dtype: torch.dtype):
        super().__init__()
        self.tables = nn.ModuleList(tables)
        self.names: list[str] = names
        self.dims: list[int] = dims
        self.output_dtype = output_dtype

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool the bags of all features."""
        bags = features.to_dict()
        pooled: list[Tensor] = []
        for table in self.tables:
            for name in table.features:  # type: ignore[union-attr]
                own = bags[name]
                weights: Tensor | None = None
                if table.is_weighted:
                    weights = own.weights().float()
                pooled.append(table(own.values(), own.offsets(), own.lengths(), weights))
        return KeyedTensor(self.names, self.dims, torch.cat(pooled, dim=1).to(self.output_dtype))


class ScriptedSequences(nn.Module):
    """A collection of tables whose ids are looked up one by one, for TorchScript."""

    def __init__(
        self, tables: list[nn.Module], names: list[str], output_dtype: torch.dtype, need_indices: bool
    ):
        super().__init__()
        self.tables = nn.ModuleList(tables)
        self.names: list[str] = names
        self.output_dtype = output_dtype
        self.need_indices: bool = need_indices

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up the ids of all features."""
        bags = features.to_dict()
        found: dict[str, JaggedTensor] = {}
        index = 0
        for table in self.tables:
            for name in table.features:  # type: ignore[union-attr]
                own = bags[name]
                ids = own.values()
                rows = table.rows_of(ids)  # type: ignore[operator]
                indices: Tensor | None = None
                if self.need_indices:
                    indices = ids
                found[self.names[index]] = JaggedTensor(rows.to(self.output_dtype), indices, own.lengths())
                index += 1
        return found


def scriptable(
    collection: Any,
    configs: Sequence[EmbeddingConfig],
    rows_of: Callable[[str], QuantizedRows],
    known: Mapping[str, tuple[Tensor, Tensor]] | None = None,
) -> nn.Module:
    """The module that TorchScript compiles for a quantized collection; it can be called from Python too.

    Args:
        collection: the collection, whole or cut.
        configs: configurations of its tables.
        rows_of: function from the name of a table to its rows.
        known: name of a table of some ids alone -> these, sorted, and the row of each, ``[K]`` int64.
    """
    register_script_types()
    names, is_weighted = collection.embedding_names(), collection.is_weighted()
    tables: list[nn.Module] = [
        ScriptedTable(config, rows_of(config.name), is_weighted, (known or {}).get(config.name))
        for config in configs
    ]
    if not hasattr(collection, "embedding_bag_configs"):
        need_indices = getattr(collection, "_need_indices", False)
        return ScriptedSequences(tables, names, collection.output_dtype, need_indices)
    dims = [config.embedding_dim for config in configs for _ in config.feature_names]
    return ScriptedBags(tables, names, dims, collection.output_dtype)
