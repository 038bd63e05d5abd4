"""Sharded tables whose ids are keys, seen as tables of rows: row ``r`` is what key ``r`` brings.

Legend: R rows, D columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwright.sparse import KeyedJaggedTensor
from shardwright_testing.kernels.keys import SIGHTINGS, keys_of

if TYPE_CHECKING:
    from shardwright_testing.equality.cases import Case


def with_keys(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The batch with keys for rows."""
    ids = batch.values().long()
    keys = keys_of(int(ids.max()) + 1)[ids] if len(ids) else ids
    return KeyedJaggedTensor(
        keys=batch.keys(), values=keys, lengths=batch.lengths(), weights=batch.weights_or_none()
    )


def every_row(case: Case) -> KeyedJaggedTensor:
    """A bag for each row that a feature can look up."""
    most = max(table.rows for table in case.tables)
    counts = [min(case.rows_of(feature), most) for feature in case.features]
    ids = torch.cat([torch.arange(count) for count in counts])
    return KeyedJaggedTensor(
        keys=case.features,
        values=ids,
        lengths=torch.cat([(torch.arange(most) < count).int() for count in counts]),
        weights=torch.ones(len(ids)) if case.is_weighted else None,
    )


def born_rows(case: Case, sharded: Any) -> dict[str, Tensor]:
    """Look every key up in training, so that it has a row, and give what the rows begin with.

    Raises:
        AssertionError: a key brings zeros after that: it has no row.
    """
    for _ in range(SIGHTINGS):
        sharded(with_keys(every_row(case))).values()
    rows = looked_up_rows(case, sharded)
    for index, (name, weight) in enumerate(rows.items()):
        table = case.tables[index]
        seen = max(case.rows_of(feature) for feature in table.features)
        without = (weight[:seen] == 0).all(1).nonzero().flatten().tolist()
        assert not without, (
            f"{name}: {len(without)} of {seen} keys have no row after they were looked up in training {SIGHTINGS} "
            f"times, though there is room for {case.specs()[index].num_embeddings}"
        )
    return rows


def looked_up_rows(case: Case, sharded: Any) -> dict[str, Tensor]:
    """Return the row of each key, by the names of the unsharded module's state: ``[R, D]``; zeros for others."""
    with torch.no_grad():
        result = sharded(with_keys(every_row(case)))
        module = case.module()
        found = {}
        for (name, like), table, outputs in zip(
            module.named_parameters(), case.tables, module.embedding_names_by_table(), strict=True
        ):
            found[name] = torch.zeros(like.shape)
            for feature, output in zip(table.features, outputs, strict=True):
                count = case.rows_of(feature)
                values = result[output] if case.is_pooled else result[output].values()
                found[name][:count] = values[:count]
    return found
