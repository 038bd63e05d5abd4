"""Collections of tables in a model, whatever they are: unsharded, sharded, quantized already, or pruned.

Legend: K ids of a table that have rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from shardwright import (
    DataType,
    EmbeddingConfig,
    InvalidInputError,
    PlanError,
    PoolingType,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    ShardingPlan,
    TableCollection,
    UnknownNameError,
    UnsupportedError,
)
from shardwright_serving.packages.rows_file import Blocks, TableRows
from shardwright_serving.rows.formats import SERVED
from shardwright_serving.rows.quantized_rows import check_served
from shardwright_serving.tables.known_ids import KnownIds
from shardwright_serving.tables.placed_collections import PlacedCollection
from shardwright_serving.tables.quantized_collection import QuantizedCollection

KEYED = (
    "its ids are keys, and packages look up rows. Quantize the rows that have keys, put shardwright_serving.KnownIds "
    "with these in the collection's place, and export that"
)
"""End of the sentence that refuses a table whose rows are found by keys."""

ShardedCollection: TypeAlias = ShardedEmbeddingBagCollection | ShardedEmbeddingCollection
Collection: TypeAlias = TableCollection | KnownIds | ShardedCollection


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
        return hasattr(self._held, "embedding_bag_configs")

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
        return self._held.embedding_names()

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
        if isinstance(self._held, PlacedCollection):
            return True
        return not isinstance(self._held, ShardedCollection) and self._held.device.type != "meta"

    @property
    def is_quantized(self) -> bool:
        """True if the tables have their precision already."""
        return isinstance(self._held, QuantizedCollection | PlacedCollection)

    @property
    def _held(self) -> TableCollection | ShardedCollection:
        if not isinstance(self.module, KnownIds):
            return self.module
        held = self.module.collection
        assert isinstance(held, TableCollection)
        return held

    def known_ids(self, table: str) -> Tensor | None:
        """The sorted ids of a table that have rows, ``[K]`` int64 in host memory; ``None`` if all have."""
        found = self._known.get(table)
        return None if found is None else found[0].cpu()

    @property
    def _known(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        return self.module.ids_of_rows() if isinstance(self.module, KnownIds) else {}

    def weight_name(self, table: str) -> str:
        """The name of a table's weights among those of the unsharded collection."""
        return f"{'embedding_bags' if self.is_pooled else 'embeddings'}.{table}.weight"

    def _of(self, name: str, *, default: Any) -> Any:
        found = getattr(self._held, name, default)
        return found() if callable(found) else found

    def blocks(self, table: TableRows) -> Blocks:
        """The rows of a table, some at a time, in shared storage; those of known ids in the order of these.

        Args:
            table: one of the tables, whose rows are here.
        """
        held = self._held
        assert not isinstance(held, ShardedCollection)  # those have no rows here
        whole = (
            held.quantized_rows(table.name)
            if isinstance(held, QuantizedCollection | PlacedCollection)
            else held.table_weight(table.name).detach()
        )
        order = self._order_of(table.name)
        for start in range(0, table.num_embeddings, table.rows_at_once):
            some = slice(start, start + table.rows_at_once)
            chosen = some if order is None else order[some]
            yield whole[chosen] if isinstance(whole, Tensor) else whole.rows(chosen)

    def _order_of(self, table: str) -> Tensor | None:
        """Numbers of the rows in the order of the known ids, ``[K + 1]``; ``None`` if all ids have rows."""
        if table not in self._known:
            return None
        rows = self._known[table][1].cpu()
        return torch.cat([rows, rows.new_tensor([len(rows)])])  # that of zeros is the last


def served_in(model: nn.Module) -> dict[str, Served]:
    """The collections of a model by path.

    Raises:
        InvalidInputError: it has none.
        UnsupportedError: the rows of one are quantized and cut over ranks, or are found by keys.
    """
    found = {path: Served(module, _configs(module)) for path, module in _collections(model)}
    for path, one in found.items():
        if isinstance(one.module, ShardedCollection):
            _check_sharded(one.module, path)
    if not found:
        raise InvalidInputError(f"this {type(model).__name__} has no collection of tables to export")
    return found


def _check_sharded(module: ShardedCollection, path: str) -> None:
    if isinstance(module.inputs.unsharded, QuantizedCollection):
        raise UnsupportedError(
            f"the quantized tables of the {type(module).__name__} at {path!r} are cut over ranks: give "
            "model.unshard(), which every rank calls, or the model before it was quantized"
        )
    for spec in module.inputs.specs:
        if module.inputs.params[spec.name].layout.row_map.takes_any_id:
            raise UnsupportedError(f"table {spec.describe()}: {KEYED}")


def _collections(model: nn.Module) -> Iterator[tuple[str, Collection]]:
    parts: set[nn.Module] = set()
    for path, module in model.named_modules():
        # Placed collections and those of known ids hold collections, which are not the model's own.
        if isinstance(module, Collection) and module not in parts:
            parts.update(module.modules())
            yield path, module


def _configs(module: Collection) -> Sequence[EmbeddingConfig]:
    name = "embedding_bag_configs" if hasattr(module, "embedding_bag_configs") else "embedding_configs"
    return list(getattr(module, name)())


def tables_of(
    served: Mapping[str, Served],
    precision: DataType | str,
    per_table: Mapping[str, DataType | str],
    plan: ShardingPlan | None = None,
) -> dict[str, list[TableRows]]:
    """The tables of each collection with the precision of their rows, without places; quantized ones keep theirs.

    Args:
        served: collections by path.
        precision: precision of float tables.
        per_table: name of a table -> another precision.
        plan: plan whose document says the precision of tables that ``per_table`` leaves out.

    Raises:
        InvalidInputError: the plan says no precision.
        UnknownNameError: ``per_table`` or the plan names a table of no collection.
        UnsupportedError: tables cannot be quantized to a type that was asked for, or have another one already.
    """
    names = [config.name for one in served.values() for config in one.configs]
    planned = {} if plan is None else _planned(plan)
    for whose, given in (("per_table", per_table), ("the plan", planned)):
        for name in given:
            if name not in names:
                raise UnknownNameError(
                    f"{whose} names {name!r}, a table of no collection; there are {', '.join(names)}"
                )
    asked = {**planned, **per_table}
    return {
        path: [_table(one, config, asked.get(config.name), precision) for config in one.configs]
        for path, one in served.items()
    }


def _planned(plan: ShardingPlan) -> dict[str, DataType]:
    """Name of a table -> the precision that it was planned with, if tables can be quantized to it.

    Raises:
        InvalidInputError: the plan has none, or two for one name.
    """
    if not isinstance(plan, ShardingPlan):
        raise InvalidInputError(f"plan is a ShardingPlan, got a {type(plan).__name__}")
    try:
        entries = plan.document.get("inputs", {}).get("tables", {}).get("value", ())
        tables = [(str(entry["name"]), DataType(entry.get("data_type", "FP32"))) for entry in entries]
    except (AttributeError, InvalidInputError, LookupError, TypeError) as error:
        raise PlanError(
            f"the plan document's inputs.tables are not as a planner writes them: {error}"
        ) from error
    types = {name: data_type for name, data_type in tables if data_type in SERVED}
    if not types:
        raise InvalidInputError(
            f"no table of the plan has a precision of {', '.join(SERVED)}: plan tables with their data_type, or give "
            "precision= and per_table="
        )
    for name, data_type in tables:
        if types.get(name, data_type) is not data_type:
            raise InvalidInputError(
                f"the plan has tables {name!r} of {data_type} and {types[name]}; a package has one precision for a name"
            )
    return types


def _table(
    served: Served, config: EmbeddingConfig, asked: DataType | str | None, precision: DataType | str
) -> TableRows:
    data_type = evolve(config, data_type=precision if asked is None else asked).data_type
    if served.is_quantized:
        if asked is not None and data_type is not config.data_type:
            raise UnsupportedError(
                f"table {config.name!r} is {config.data_type} already and cannot become {data_type}: give the model "
                "before it was quantized"
            )
        data_type = config.data_type
    check_served(data_type)
    return TableRows(config.name, data_type, config.num_embeddings, config.embedding_dim)
