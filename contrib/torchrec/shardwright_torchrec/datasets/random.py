"""Random batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch.utils.data import IterableDataset

import shardwright as sw
from shardwright_torchrec.datasets.utils import Batch

_ROWS = 100
"""Rows that ids are drawn from where no table size is given, TorchRec's default."""
_IDS = 2
"""Most ids of a bag where no number is given, TorchRec's default."""


class RandomRecDataset(IterableDataset):  # type: ignore[type-arg]  # of Batch
    """Batches of random ids, dense features and labels.

    Args:
        keys: the sparse features.
        batch_size: samples of a batch.
        hash_size: ids are below it, for all features.
        hash_sizes: the same feature by feature.
        ids_per_feature: ids of each bag, for all features; with `min_ids_per_feature`, the most.
        ids_per_features: most ids of each bag, feature by feature; bags have from 0 ids on.
        num_dense: columns of the dense features.
        manual_seed: seed, of which TorchRec makes the same batches; torch's own generator by default.
        num_batches: number of batches; no end by default.
        num_generated_batches: batches that are drawn, and then repeated; 0 or less: each is drawn.
        min_ids_per_feature: least ids of a bag; `ids_per_feature` by default, and 0 where that is not given either.
        min_ids_per_features: the same feature by feature.

    Raises:
        InvalidInputError: a list is not one value a feature, or both forms are given.
    """

    def __init__(
        self,
        keys: list[str],
        batch_size: int,
        hash_size: int | None = None,
        hash_sizes: list[int] | None = None,
        ids_per_feature: int | None = None,
        ids_per_features: list[int] | None = None,
        num_dense: int = 50,
        manual_seed: int | None = None,
        num_batches: int | None = None,
        num_generated_batches: int = 10,
        min_ids_per_feature: int | None = None,
        min_ids_per_features: list[int] | None = None,
    ) -> None:
        self._keys, self._batch_size, self._num_dense = keys, batch_size, num_dense
        self._rows = self._each("hash_size", hash_size, hash_sizes, _ROWS)
        self._most = self._each("ids_per_feature", ids_per_feature, ids_per_features, _IDS)
        least = ids_per_feature or 0
        self._least = self._each("min_ids_per_feature", min_ids_per_feature, min_ids_per_features, least)
        self._generator = None if manual_seed is None else torch.Generator().manual_seed(manual_seed)
        self._num_batches = num_batches
        self._made = [self._draw() for _ in range(num_generated_batches)]

    def _each(self, name: str, one: int | None, many: list[int] | None, default: int) -> list[int]:
        """A value for each feature."""
        if one is not None and many is not None:
            raise sw.InvalidInputError(f"give {name} or {name}s, not both")
        values = many if many is not None else [default if one is None else one] * len(self._keys)
        if len(values) != len(self._keys):
            raise sw.InvalidInputError(f"{name}s has {len(values)} values for {len(self._keys)} keys")
        return values

    def __iter__(self) -> Iterator[Batch]:
        made = itertools.cycle(self._made) if self._made else iter(self._draw, None)
        return itertools.islice(made, self._num_batches)

    def __len__(self) -> int:
        if self._num_batches is None:
            raise TypeError("a dataset without num_batches has no length")
        return self._num_batches

    def _draw(self) -> Batch:
        lengths, values = [], []
        for low, high, rows in zip(self._least, self._most, self._rows, strict=True):
            lengths.append(
                torch.randint(
                    low, high + 1, (self._batch_size,), dtype=torch.int32, generator=self._generator
                )
            )
            values.append(torch.randint(rows, (int(lengths[-1].sum()),), generator=self._generator))
        return Batch(
            torch.randn(self._batch_size, self._num_dense, generator=self._generator),
            sw.KeyedJaggedTensor(keys=self._keys, values=torch.cat(values), lengths=torch.cat(lengths)),
            torch.randint(2, (self._batch_size,), generator=self._generator),
        )
