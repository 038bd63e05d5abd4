"""Tables that have rows for some ids alone: pruned tables, and tables whose ids are keys.

Legend: K ids that have rows, N ids of a feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwright import InvalidInputError, KeyedJaggedTensor, UnsupportedError
from shardwright_serving.rows.quantized_rows import QuantizedRows
from shardwright_serving.tables.collections import QuantEmbeddingCollection
from shardwright_serving.tables.quantized_collection import QuantizedCollection


def with_zero_row(rows: QuantizedRows) -> QuantizedRows:
    """Rows and one more, whose values are zeros: that of ids that have none."""
    stored = torch.nn.functional.pad(rows.packed(), (0, 0, 0, 1))
    return QuantizedRows(rows.data_type, rows.num_columns, stored)


def ids_of(table: str, ids: Mapping[str, Tensor | Sequence[int]]) -> Tensor:
    """The ids of a table that have rows, ``[K]`` int64.

    Args:
        table: name of the table.
        ids: table name -> its ids.

    Raises:
        InvalidInputError: they are no integers, or some are masked.
    """
    if np.ma.is_masked(ids[table]):  # torch takes what is behind the mask
        raise InvalidInputError(
            f"of the ids of table {table!r} some are masked: give .compressed()", subject=table, asked="mask"
        )
    try:
        own = torch.as_tensor(ids[table]).flatten()
    except (RuntimeError, TypeError, ValueError):
        raise InvalidInputError(
            f"ids of table {table!r} must be integers, got a {type(ids[table]).__name__}"
        ) from None
    if own.numel() and (own.is_floating_point() or own.dtype == torch.bool):
        raise InvalidInputError(
            f"ids of table {table!r} are {own.dtype}; they must be integers: of a mask give mask.nonzero()"
        )
    return own.long()


class KnownIds(nn.Module):
    """A quantized collection, before which ids become rows; an id that has no row gives zeros.

    It has whatever the collection has: ``tables``, ``embedding_names()``, ``quantized_rows(table)``. Tables there have
    the rows that are kept, and one of zeros.

    Args:
        collection: the collection; the last row of each table in ``ids`` is zeros.
        ids: table name -> the id of each of its other rows, ``[K]`` integers, distinct, in any order.

    Raises:
        InvalidInputError: an id occurs twice, or there are more or fewer than the table has rows.
        UnsupportedError: a feature is looked up in tables of other ids, or outputs are to carry the ids.
    """

    def __init__(self, collection: QuantizedCollection, ids: Mapping[str, Tensor | Sequence[int]]) -> None:
        super().__init__()
        if isinstance(collection, QuantEmbeddingCollection) and collection.need_indices():
            raise UnsupportedError(
                "outputs that carry the ids (need_indices) would carry rows of pruned tables"
            )
        self.collection = collection
        self._table_of_feature: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        for number, table in enumerate(collection.tables):
            if table.name in ids:
                self._keep(number, table.name, ids_of(table.name, ids), table.num_embeddings)
                self._table_of_feature.update(dict.fromkeys(table.feature_names, number))
        for table in collection.tables:
            shared = set(table.feature_names) & set(self._table_of_feature)
            own = {self._table_of_feature[name] for name in shared}
            if shared and (table.name not in ids or own != {self._number_of(table.name)}):
                raise UnsupportedError(
                    f"feature {min(shared)!r} is looked up in table {table.name!r} and in another that has rows of "
                    "other ids: give it a feature of its own"
                )

    def _number_of(self, name: str) -> int:
        return [table.name for table in self.collection.tables].index(name)

    def _keep(self, number: int, name: str, ids: Tensor, num_rows: int) -> None:
        known, rows = ids.sort()
        again = known[1:][known.diff() == 0]
        if len(again):
            raise InvalidInputError(
                f"ids of table {name!r} have {int(again[0])} more than once ({len(ids)} ids, {len(ids.unique())} of "
                "them distinct): give each id once, as ids.unique() does"
            )
        if len(ids) != num_rows - 1:
            raise InvalidInputError(
                f"table {name!r} has {num_rows - 1} rows beside that of zeros and needs as many ids, got {len(ids)}"
            )
        self._numbers[name] = number
        self.register_buffer(f"known_{number}", known)
        self.register_buffer(f"row_{number}", rows)

    def __getattr__(self, name: str) -> Any:
        """An attribute of the collection, where this has none of that name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "collection" not in self.__dict__.get("_modules", {}):
                raise
        return getattr(self.collection, name)

    def ids_of_rows(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The sorted ids and the row of each, ``[K]`` int64, by the name of a table that has rows of some ids alone."""
        return {
            name: (getattr(self, f"known_{number}"), getattr(self, f"row_{number}"))
            for name, number in self._numbers.items()
        }

    def __prepare_scriptable__(self) -> nn.Module:
        """The module that `torch.jit.script` compiles in the place of this one and its collection."""
        from shardwright_serving.scripting.quantized import scriptable  # asked for by few

        held = self.collection
        return scriptable(held, held.tables, held.quantized_rows, self.ids_of_rows())

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """Look up; see the collection's ``forward``.

        Raises:
            UnsupportedError: features have batch sizes of their own.
        """
        if not isinstance(features, KeyedJaggedTensor) or features.values().dtype not in (
            torch.int32,
            torch.int64,
        ):
            return self.collection(features)  # which says what is wrong
        if features.variable_stride_per_key():
            raise UnsupportedError("features of pruned tables cannot have batch sizes of their own")
        offsets, values = features.offset_per_key(), features.values().long().clone()
        for position, key in enumerate(features.keys()):
            if key in self._table_of_feature:
                span = slice(offsets[position], offsets[position + 1])
                values[span] = self._rows_of(self._table_of_feature[key], values[span])
        changed = KeyedJaggedTensor(features.keys(), values, features.weights_or_none(), features.lengths())
        return self.collection(changed)

    def _rows_of(self, number: int, ids: Tensor) -> Tensor:
        """Row of each id, ``[N]``; that of zeros for an id that has none."""
        known, rows = getattr(self, f"known_{number}"), getattr(self, f"row_{number}")
        if not len(known):
            return torch.zeros_like(ids)
        place = torch.searchsorted(known, ids).clamp(max=len(known) - 1)
        return torch.where(known[place] == ids, rows[place], len(known))
