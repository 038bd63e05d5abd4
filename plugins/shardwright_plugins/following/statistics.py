"""Ids per bag of the batches that a model's collections are given.

Legend: F features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardwright.planning.tables.spec import TableSpec

if TYPE_CHECKING:
    from shardwright.sparse import KeyedJaggedTensor

Counts = dict[tuple[str, str], tuple[int, int]]
"""Path of a module and name of a feature -> ids and bags."""


class IdCounts:
    """Ids and bags of each feature, counted where collections are given batches that they take; not under ``no_grad``.

    Args:
        collections: path -> collection, a module that is called with a batch.

    Attributes:
        is_counting: mark without which batches are passed by.
    """

    def __init__(self, collections: Mapping[str, Any]) -> None:
        self.is_counting = True
        self.counts: Counts = {}
        self._hooks = [
            module.register_forward_hook(self._counting(path), with_kwargs=True)
            for path, module in collections.items()
        ]

    def close(self) -> None:
        """Count no more."""
        for hook in self._hooks:
            hook.remove()

    def _counting(self, path: str) -> Any:
        def count(
            module: Any, batches: Sequence[KeyedJaggedTensor], named: Mapping[str, Any], output: Any
        ) -> None:
            if not self.is_counting or not torch.is_grad_enabled():
                return
            batch = batches[0] if batches else next(iter(named.values()))
            per_key = zip(batch.keys(), batch.length_per_key(), batch.stride_per_key(), strict=True)
            for name, ids, bags in per_key:
                known = self.counts.get((path, name), (0, 0))
                self.counts[path, name] = (known[0] + ids, known[1] + bags)

        return count


def ids_per_bag(counts: Sequence[Counts], tables: Sequence[TableSpec]) -> dict[str, list[float]]:
    """Ids per bag of each feature of tables, by path; tables of which a feature had no bag are left out.

    Args:
        counts: the counts of each rank.
        tables: the tables.
    """
    found = {}
    for table in tables:
        own = [
            [of_rank.get((table.module, name), (0, 0)) for of_rank in counts] for name in table.feature_names
        ]
        bags = [sum(bags for _, bags in of_feature) for of_feature in own]
        if all(bags):
            ids = [sum(ids for ids, _ in of_feature) for of_feature in own]
            found[table.path] = [round(number / count, 4) for number, count in zip(ids, bags, strict=True)]
    return found
