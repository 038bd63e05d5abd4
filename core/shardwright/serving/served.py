"""Collections of tables in a model, whatever they are: unsharded, sharded, or quantised already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from attrs import evolve, frozen
from torch import nn

from shardwright.errors import InvalidInputError, UnknownNameError, UnsupportedError, nearest
from shardwright.modules.embedding_modules import TableCollection
from shardwright.modules.quantized.collections import QuantizedCollection
from shardwright.modules.quantized.known_ids import KnownIds
from shardwright.modules.quantized.rows import check_served
from shardwright.planning.tables.spec import DataType, EmbeddingConfig, PoolingType
from shardwright.runtime.sharded.collections.sharded_collection import ShardedCollection
from shardwright.serving.rows_file import Blocks, TableRows

__all__ = ["Collection", "Served", "served_in", "tables_of"]

Collection: TypeAlias = TableCollection | QuantizedCollection | ShardedCollection


@frozen(eq=False)
class Served:
    """A collection of tables in a model, as programs need to know it.

    Args:
        module: the collection.
        configs: configurations of its tables, in order.
    """

    module: Collection
    configs: Sequence[EmbeddingConfig]

    @property
    def is_pooled(self) -> bool:
        """True if ids are pooled into one vector a bag."""
        return hasattr(self.module, "embedding_bag_configs")

    @property
    def is_weighted(self) -> bool:
        """True if each id carries a weight."""
        return self.is_pooled and bool(self._of("is_weighted", default=False))

    @property
    def need_indices(self) -> bool:
        """True if outputs carry the ids as their weights."""
        return not self.is_pooled and bool(self._of("need_indices", default=False))

    @property
    def output_dtype(self) -> torch.dtype:
        """Dtype of the outputs."""
        dtype = self._of("output_dtype", default=torch.float32)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def embedding_names(self) -> list[str]:
        """The names of the outputs."""
        return self.module.embedding_names()

    @property
    def poolings(self) -> list[PoolingType]:
        """The pooling of each output."""
        return [
            getattr(config, "pooling", PoolingType.NONE)
            for config in self.configs
            for _ in config.feature_names
        ]

    @property
    def has_rows(self) -> bool:
        """True if the rows of all tables are in this module and not on ``meta``."""
        return not isinstance(self.module, ShardedCollection) and self.module.device.type != "meta"

    def weight_name(self, table: str) -> str:
        """The name of a table's weights among those of the unsharded collection."""
        return f"{'embedding_bags' if self.is_pooled else 'embeddings'}.{table}.weight"

    def _of(self, name: str, *, default: Any) -> Any:
        found = getattr(self.module, name, default)
        return found() if callable(found) else found

    def blocks(self, table: TableRows) -> Blocks:
        """The rows of a table, some at a time, in shared storage.

        Args:
            table: one of the tables, whose rows are here.
        """
        assert not isinstance(self.module, ShardedCollection)  # those have no rows here
        for start in range(0, table.num_embeddings, table.rows_at_once):
            some = slice(start, start + table.rows_at_once)
            if isinstance(self.module, QuantizedCollection):
                yield self.module.quantized_rows(table.name).rows(some)
            else:
                yield self.module.table_weight(table.name).detach()[some]


def served_in(model: nn.Module) -> dict[str, Served]:
    """The collections of a model by path.

    Raises:
        InvalidInputError: it has none.
        UnsupportedError: a table has rows of some ids alone.
    """
    for module in model.modules():
        if isinstance(module, KnownIds):
            raise UnsupportedError(
                f"table {next(iter(module.ids_of_rows()), '')!r} has rows of some ids alone, which packages cannot "
                "find: export the model with whole tables, or use torch.jit.script"
            )
    found = {path: Served(module, _configs(module)) for path, module in _collections(model)}
    if not found:
        raise InvalidInputError(f"this {type(model).__name__} has no collection of tables to export")
    return found


def _collections(model: nn.Module) -> Iterator[tuple[str, Collection]]:
    for path, module in model.named_modules():
        if isinstance(module, TableCollection | QuantizedCollection | ShardedCollection):
            yield path, module


def _configs(module: Collection) -> Sequence[EmbeddingConfig]:
    name = "embedding_bag_configs" if hasattr(module, "embedding_bag_configs") else "embedding_configs"
    return list(getattr(module, name)())


def tables_of(
    served: Mapping[str, Served], precision: DataType | str, per_table: Mapping[str, DataType | str]
) -> dict[str, list[TableRows]]:
    """The tables of each collection with the precision of their rows, without places; quantised ones keep theirs.

    Args:
        served: collections by path.
        precision: precision of float tables.
        per_table: name of a table -> another precision.

    Raises:
        UnknownNameError: ``per_table`` names a table of no collection.
        UnsupportedError: tables cannot be quantised to a type that was asked for.
    """
    names = [config.name for one in served.values() for config in one.configs]
    for name in per_table:
        if name not in names:
            raise UnknownNameError(
                f"per_table names {name!r}, a table of no collection.{nearest(name, names)}"
            )
    return {
        path: [_table(one, config, per_table.get(config.name, precision)) for config in one.configs]
        for path, one in served.items()
    }


def _table(served: Served, config: EmbeddingConfig, precision: DataType | str) -> TableRows:
    if isinstance(served.module, QuantizedCollection):
        data_type = config.data_type
    else:
        data_type = evolve(config, data_type=precision).data_type
        check_served(data_type)
    return TableRows(config.name, data_type, config.num_embeddings, config.embedding_dim)
