"""Criteo's click logs, as NumPy arrays in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

import shardwright as sw
from shardwright_torchrec.datasets.utils import Batch

# The columns of the data set: a label, 13 counts and 26 hexadecimal categories, over 24 days.
INT_FEATURE_COUNT = 13
CAT_FEATURE_COUNT = 26
DAYS = 24
TOTAL_TRAINING_SAMPLES = 4195197692
"""Samples of days 0 to 22, as MLPerf's DLRM counts them."""
DEFAULT_LABEL_NAME = "label"
DEFAULT_INT_NAMES: list[str] = [f"int_{number}" for number in range(INT_FEATURE_COUNT)]
DEFAULT_CAT_NAMES: list[str] = [f"cat_{number}" for number in range(CAT_FEATURE_COUNT)]
DEFAULT_COLUMN_NAMES: list[str] = [DEFAULT_LABEL_NAME, *DEFAULT_INT_NAMES, *DEFAULT_CAT_NAMES]


class InMemoryBinaryCriteoIterDataPipe(IterableDataset):  # type: ignore[type-arg]  # of Batch
    """Batches of a rank's part of Criteo's data as numpy arrays.

    Rows of all files are numbered in the order given; each rank has a run of them.

    Args:
        stage: `"train"`, `"val"` or `"test"`, which is not looked at: files are given.
        dense_paths: arrays ``[rows, 13]`` float32.
        sparse_paths: arrays ``[rows, 26]`` int32.
        labels_paths: arrays ``[rows, 1]`` int32.
        batch_size: samples of a batch.
        rank: number of this rank.
        world_size: number of ranks.
        drop_last: leave out the last batch if it is smaller.
        shuffle_batches: shuffle the samples inside each batch.
        shuffle_training_set: shuffle the rank's rows first.
        shuffle_training_set_random_seed: seed of that.
        mmap_mode: map files instead of reading them.
        hashes: rows of each table; ids are taken modulo these.
        path_manager_key: not needed.

    Raises:
        InvalidInputError: there are not as many files of each kind.
    """

    def __init__(
        self,
        stage: str,
        dense_paths: list[str],
        sparse_paths: list[str],
        labels_paths: list[str],
        batch_size: int,
        rank: int,
        world_size: int,
        drop_last: bool | None = False,
        shuffle_batches: bool = False,
        shuffle_training_set: bool = False,
        shuffle_training_set_random_seed: int = 0,
        mmap_mode: bool = False,
        hashes: list[int] | None = None,
        path_manager_key: str = "torchrec",
    ) -> None:
        if not len(dense_paths) == len(sparse_paths) == len(labels_paths):
            raise sw.InvalidInputError(
                f"as many files of each kind are needed, got {len(dense_paths)} dense, {len(sparse_paths)} sparse and "
                f"{len(labels_paths)} of labels"
            )
        self._batch_size, self._drop_last, self._shuffles = batch_size, drop_last, shuffle_batches
        mode = "r" if mmap_mode else None
        files = [
            [np.load(path, mmap_mode=mode) for path in paths]
            for paths in (dense_paths, sparse_paths, labels_paths)
        ]
        self._dense, self._sparse, self._labels = (_part(arrays, rank, world_size) for arrays in files)
        if hashes is not None:
            self._sparse = self._sparse % np.array(hashes, dtype=self._sparse.dtype)
        if shuffle_training_set:
            order = np.random.default_rng(shuffle_training_set_random_seed).permutation(len(self._labels))
            self._dense, self._sparse, self._labels = (
                array[order] for array in (self._dense, self._sparse, self._labels)
            )

    def __len__(self) -> int:
        count = len(self._labels)
        return count // self._batch_size if self._drop_last else -(-count // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for number in range(len(self)):
            yield self._batch(slice(number * self._batch_size, (number + 1) * self._batch_size))

    def _batch(self, rows: slice) -> Batch:
        dense, sparse, labels = (
            torch.from_numpy(np.ascontiguousarray(array[rows]))
            for array in (self._dense, self._sparse, self._labels)
        )
        if self._shuffles:
            order = torch.randperm(len(labels))
            dense, sparse, labels = dense[order], sparse[order], labels[order]
        ids = sparse.T.reshape(-1)
        features = sw.KeyedJaggedTensor(
            keys=DEFAULT_CAT_NAMES, values=ids, lengths=torch.ones(len(ids), dtype=torch.int32)
        )
        return Batch(dense, features, labels.reshape(-1))


def _part(arrays: list[Any], rank: int, world_size: int) -> Any:
    """A rank's rows of several arrays: the first ranks have one more where they cannot be equal."""
    total = sum(len(array) for array in arrays)
    first, last = (
        number * (total // world_size) + min(number, total % world_size) for number in (rank, rank + 1)
    )
    parts, start = [], 0
    for array in arrays:
        low, high = max(first - start, 0), min(last - start, len(array))
        if low < high:
            parts.append(array[low:high])
        start += len(array)
    return np.concatenate(parts) if parts else arrays[0][:0]
