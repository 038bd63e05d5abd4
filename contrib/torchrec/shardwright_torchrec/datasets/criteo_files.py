"""Criteo's click logs made into numpy arrays on disk."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import shardwright as sw
from shardwright_torchrec.datasets.criteo import (
    CAT_FEATURE_COUNT,
    DAYS,
    INT_FEATURE_COUNT,
    CriteoIterDataPipe,
)

__all__ = ["BinaryCriteoUtils"]

SMALLEST_COUNT = 2
"""Least value that counts have before their logarithm is taken; TorchRec's number."""
RARE, FIRST_FREQUENT = 1, 2
"""Id of all rare categories of a column, and the first of the others; TorchRec's numbers."""


class BinaryCriteoUtils:
    """Steps from Criteo's text files to the arrays that `InMemoryBinaryCriteoIterDataPipe` reads."""

    @staticmethod
    def tsv_to_npys(
        in_file: str,
        out_dense_file: str,
        out_sparse_file: str,
        out_labels_file: str,
        dataset_name: str = "criteo_1tb",
        path_manager_key: str = "torchrec",
    ) -> None:
        """Write a text file as arrays.

        Counts become logarithms, float32 ``[rows, 13]``; categories int64 ``[rows, 26]``, labels int32 ``[rows, 1]``.
        Missing values are 0. The test file of Kaggle's data set has no labels: they become 1.

        Args:
            in_file: tab-separated file.
            out_dense_file: file of the counts.
            out_sparse_file: file of the categories.
            out_labels_file: file of the labels.
            dataset_name: `"criteo_1tb"` or `"criteo_kaggle"`.
            path_manager_key: not needed.
        """
        without_labels = dataset_name == "criteo_kaggle" and "test" in Path(in_file).name
        lines = [
            ["1", *line] if without_labels else line
            for line in CriteoIterDataPipe([in_file], row_mapper=None)
        ]
        first_category = 1 + INT_FEATURE_COUNT
        counts = np.array([_numbers(line[1:first_category], 10) for line in lines], dtype=np.int32)
        categories = [
            _numbers(line[first_category : first_category + CAT_FEATURE_COUNT], 16) for line in lines
        ]
        labels = np.array([_numbers(line[:1], 10) for line in lines], dtype=np.int32)
        _save(out_dense_file, np.log(counts - counts.min() + SMALLEST_COUNT, dtype=np.float32))
        _save(out_sparse_file, np.array(categories, dtype=np.int64))
        _save(out_labels_file, labels)

    @staticmethod
    def get_shape_from_npy(path: str, path_manager_key: str = "torchrec") -> tuple[int, ...]:
        """Shape of an array on disk, without reading its values."""
        return tuple(np.load(path, mmap_mode="r").shape)

    @staticmethod
    def get_file_row_ranges_and_remainder(
        lengths: list[int],
        rank: int,
        world_size: int,
        start_row: int = 0,
        last_row: int | None = None,
    ) -> tuple[dict[int, tuple[int, int]], int]:
        """A rank's rows of several files; the first ranks have one more where they cannot be equal.

        Args:
            lengths: rows of each file.
            rank: number of the rank.
            world_size: number of ranks.
            start_row: first row of all files together.
            last_row: last row.

        Returns:
            Number of a file -> its first and last row for the rank; and the rows that are left over.
        """
        total = (sum(lengths) if last_row is None else last_row + 1) - start_row
        first, end = (
            start_row + number * (total // world_size) + min(number, total % world_size)
            for number in (rank, rank + 1)
        )
        bounds = np.cumsum([0, *lengths]).tolist()
        found = {
            number: (max(first, low) - low, min(end, high) - 1 - low)
            for number, (low, high) in enumerate(pairwise(bounds))
            if max(first, low) < min(end, high)
        }
        return found, total % world_size

    @staticmethod
    def load_npy_range(
        fname: str,
        start_row: int,
        num_rows: int,
        path_manager_key: str = "torchrec",
        mmap_mode: bool = False,
    ) -> np.ndarray[Any, Any]:
        """Some rows of an array on disk.

        Args:
            fname: file.
            start_row: first row.
            num_rows: number of rows.
            path_manager_key: not needed.
            mmap_mode: map the file instead of reading it.

        Raises:
            InvalidInputError: the array has fewer rows, or not two dimensions of numbers of 4 or 8 bytes.
        """
        mapped = np.load(fname, mmap_mode="r")
        if mapped.ndim != 2 or start_row + num_rows > len(mapped):
            raise sw.InvalidInputError(
                f"{fname} has shape {mapped.shape}; asked for were rows {start_row} to {start_row + num_rows - 1} of a "
                "matrix"
            )
        rows = mapped[start_row : start_row + num_rows]
        return rows if mmap_mode else np.array(rows)

    @staticmethod
    def sparse_to_contiguous(
        in_files: list[str],
        output_dir: str,
        frequency_threshold: int = 3,
        columns: int = CAT_FEATURE_COUNT,
        path_manager_key: str = "torchrec",
        output_file_suffix: str = "_contig_freq.npy",
    ) -> None:
        """Number the categories of each column of all files, from 2 on, as they come; rare ones have 1.

        Args:
            in_files: files of categories.
            output_dir: folder of the new files.
            frequency_threshold: categories that occur less often are rare.
            columns: number of columns.
            path_manager_key: not needed.
            output_file_suffix: end of the new files' names, after those of the old ones.
        """
        arrays = [np.load(path) for path in in_files]
        for column in range(columns):
            numbered = _numbered(np.concatenate([array[:, column] for array in arrays]), frequency_threshold)
            ends = np.cumsum([len(array) for array in arrays])[:-1]
            for array, part in zip(arrays, np.split(numbered, ends), strict=True):
                array[:, column] = part
        for path, array in zip(in_files, arrays, strict=True):
            _save(Path(output_dir) / f"{Path(path).name.partition('.')[0]}{output_file_suffix}", array)

    @staticmethod
    def shuffle(
        input_dir_labels_and_dense: str,
        input_dir_sparse: str,
        output_dir_shuffled: str,
        rows_per_day: dict[int, int],
        output_dir_full_set: str | None = None,
        days: int = DAYS,
        int_columns: int = INT_FEATURE_COUNT,
        sparse_columns: int = CAT_FEATURE_COUNT,
        path_manager_key: str = "torchrec",
        random_seed: int = 0,
    ) -> None:
        """Shuffle the rows of all days but the last, over files of as many rows.

        Args:
            input_dir_labels_and_dense: folder of `day_0_labels.npy`, `day_0_dense.npy`, ...
            input_dir_sparse: folder of `day_0_sparse.npy`, ...
            output_dir_shuffled: folder of the new files, of the same names.
            rows_per_day: number of a day -> its rows.
            output_dir_full_set: must be `None`.
            days: number of days.
            int_columns: not needed.
            sparse_columns: not needed.
            path_manager_key: not needed.
            random_seed: seed of the order.

        Raises:
            UnsupportedError: one file of all rows is asked for, which has categories in float32.
        """
        if output_dir_full_set is not None:
            raise sw.UnsupportedError(
                "output_dir_full_set: float32 does not hold categories; read the days' files"
            )
        counts = [rows_per_day[day] for day in range(days - 1)]
        order = np.random.default_rng(random_seed).permutation(sum(counts))
        dense = input_dir_labels_and_dense
        for kind, folder in {"dense": dense, "sparse": input_dir_sparse, "labels": dense}.items():
            whole = np.concatenate(
                [np.load(Path(folder) / f"day_{day}_{kind}.npy") for day in range(days - 1)]
            )
            for day, rows in enumerate(np.split(whole[order], np.cumsum(counts)[:-1])):
                _save(Path(output_dir_shuffled) / f"day_{day}_{kind}.npy", rows)


def _numbers(cells: Sequence[str], base: int) -> list[int]:
    return [int(cell or "0", base) for cell in cells]


def _save(path: str | Path, array: np.ndarray[Any, Any]) -> None:
    """Write an array to a file of just that name."""
    with Path(path).open("wb") as file:
        np.save(file, array)


def _numbered(values: np.ndarray[Any, Any], threshold: int) -> np.ndarray[Any, Any]:
    """Numbers of frequent values in the order of their first occurrence; `RARE` for the others."""
    _, first, place, counts = np.unique(values, return_index=True, return_inverse=True, return_counts=True)
    is_frequent = counts >= threshold
    numbers = np.full(len(first), RARE, dtype=values.dtype)
    by_occurrence = np.argsort(np.where(is_frequent, first, len(values)), kind="stable")[: is_frequent.sum()]
    numbers[by_occurrence] = np.arange(FIRST_FREQUENT, FIRST_FREQUENT + len(by_occurrence))
    return numbers[place]
