"""Data sets and data pipes of files on disk, under TorchRec's names; values are those that TorchRec 1.8.0 gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from shardwright_torchrec.datasets import pipes
from shardwright_torchrec.datasets.criteo import criteo_kaggle
from shardwright_torchrec.datasets.criteo_files import BinaryCriteoUtils
from shardwright_torchrec.datasets.movielens import DEFAULT_COLUMN_NAMES, movielens_20m, movielens_25m
from shardwright_torchrec.datasets.pipes import (
    Limit,
    LoadFiles,
    ParallelReadConcat,
    ReadLinesFromCSV,
    idx_split_train_val,
    rand_split_train_val,
    train_filter,
    val_filter,
)
from torch.utils.data import IterDataPipe

import shardwright as sw


def test_ratings_have_their_columns_and_movies_if_asked_for(tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,10,3.5,100\n2,12,4.0,101\n")
    (tmp_path / "movies.csv").write_text('movieId,title,genres\n10,"A, b",X|Y\n')
    assert list(movielens_20m(str(tmp_path))) == [
        {"userId": 1, "movieId": 10, "rating": 3.5, "timestamp": 100},
        {"userId": 2, "movieId": 12, "rating": 4.0, "timestamp": 101},
    ]
    first, second = movielens_25m(str(tmp_path), include_movies_data=True)
    assert list(first) == DEFAULT_COLUMN_NAMES
    assert (first["title"], first["genres"], second["title"]) == ("A, b", "X|Y", "")
    assert next(iter(movielens_20m(str(tmp_path), row_mapper=None))) == ["1", "10", "3.5", "100"]


def test_lines_of_files_are_read_without_their_headers(tmp_path: Path) -> None:
    for name, text in (("x", "a,b\n1,2\n3,4\n"), ("y", "a,b\n5,6\n")):
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path / name) for name in "xy"]
    files = LoadFiles(paths, mode="r", length=2)
    assert list(ReadLinesFromCSV(files, skip_first_line=True)) == [["1", "2"], ["3", "4"], ["5", "6"]]
    assert list(ReadLinesFromCSV(files))[0] == ["a", "b"]  # noqa: RUF015 - a second pass
    assert [file.read() for _, file in LoadFiles(paths)] == [b"a,b\n1,2\n3,4\n", b"a,b\n5,6\n"]
    assert len(files) == 2
    with pytest.raises(sw.InvalidInputError, match="length="):
        len(LoadFiles(paths))


def test_workers_share_data_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = ParallelReadConcat([1, 2], [3], [4])
    assert list(joined) == [1, 2, 3, 4]
    worker = SimpleNamespace(id=0, num_workers=2)
    monkeypatch.setattr(pipes, "get_worker_info", lambda: worker)
    assert list(joined) == [1, 2, 3]
    worker.id = 1
    assert list(joined) == [4]
    worker.num_workers = 5
    with pytest.raises(sw.InvalidInputError, match="5 workers share 3"):
        list(joined)


def test_data_pipes_have_torchs_functions(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1,2\n3,4\n5,6\n")
    lines = ReadLinesFromCSV(LoadFiles([str(tmp_path / "a")], mode="r"))
    assert list(lines.map(len).batch(2)) == [[2, 2], [2]]
    assert list(Limit(lines, 2)) == [["1", "2"], ["3", "4"]]
    for pipe in (*idx_split_train_val(lines, 0.5), criteo_kaggle("a"), movielens_20m("a")):
        assert isinstance(pipe, IterDataPipe)


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (lambda items: idx_split_train_val(items, 0.7, 1), [0, 1, 2, 3, 4, 5, 6, 10, 11]),
        (lambda items: idx_split_train_val(items, 0.5, 1, key_fn=lambda i: i // 2), [*range(10)]),
        (lambda items: rand_split_train_val(items, 0.5, 3), None),
    ],
    ids=["numbers", "keys", "random"],
)
def test_parts_for_training_and_validation_are_all(
    split: Callable[[Any], Any], expected: list[int] | None
) -> None:
    training, validation = split(range(12))
    first = list(training)
    assert sorted([*first, *validation]) == list(range(12))
    assert first == list(training)  # the same in a second pass
    assert 0 < len(first) < 12
    assert expected in (None, first)


def test_filters_look_at_last_digits() -> None:
    assert train_filter(lambda i: i, 0.7, 1, 16)
    assert val_filter(lambda i: i, 0.7, 1, 17)
    with pytest.raises(sw.InvalidInputError, match=r"in range \(0.0, 1.0\), got 1.5"):
        idx_split_train_val([], 1.5)


@pytest.mark.parametrize("name", ["day", "test"])
def test_text_becomes_arrays(tmp_path: Path, name: str) -> None:
    lines = [
        ["1", "7", "", *["3"] * 11, "68fd1e64", *[""] * 25],
        ["0", "", "2", *["-2"] * 11, "", "ffffffff", *["a"] * 24],
    ]
    given = [line[1:] if name == "test" else line for line in lines]
    (tmp_path / name).write_text("".join("\t".join(line) + "\n" for line in given))
    outs = [str(tmp_path / f"{name}_{kind}.npy") for kind in "dsl"]
    BinaryCriteoUtils.tsv_to_npys(str(tmp_path / name), *outs, dataset_name="criteo_kaggle")
    dense, sparse, labels = map(np.load, outs)
    counts = np.array([[7, 0, *[3] * 11], [0, 2, *[-2] * 11]])
    np.testing.assert_allclose(dense, np.log(counts + 4), rtol=1e-6)  # the least is -2, and becomes 2
    assert (dense.dtype, sparse.dtype, labels.dtype) == (np.float32, np.int64, np.int32)
    assert sparse[:, :3].tolist() == [[0x68FD1E64, 0, 0], [0, 0xFFFFFFFF, 10]]
    assert labels.tolist() == ([[1], [1]] if name == "test" else [[1], [0]])
    assert BinaryCriteoUtils.get_shape_from_npy(outs[0]) == (2, 13)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (([7, 4], 0, 3), ({0: (0, 3)}, 2)),
        (([7, 4], 1, 3), ({0: (4, 6), 1: (0, 0)}, 2)),
        (([7, 4], 2, 3), ({1: (1, 3)}, 2)),
        (([7, 4], 1, 2, 2, 8), ({0: (6, 6), 1: (0, 1)}, 1)),
        (([5, 5, 5], 1, 2), ({1: (3, 4), 2: (0, 4)}, 1)),
    ],
)
def test_rows_of_files_are_dealt_to_ranks(arguments: Any, expected: Any) -> None:
    assert BinaryCriteoUtils.get_file_row_ranges_and_remainder(*arguments) == expected


def test_some_rows_of_an_array_are_read(tmp_path: Path) -> None:
    path = str(tmp_path / "x.npy")
    np.save(path, np.arange(12).reshape(6, 2))
    for mapped in (False, True):
        rows = BinaryCriteoUtils.load_npy_range(path, 2, 3, mmap_mode=mapped)
        assert rows.tolist() == [[4, 5], [6, 7], [8, 9]]
    with pytest.raises(sw.InvalidInputError, match=r"shape \(6, 2\); asked for were rows 5 to 6"):
        BinaryCriteoUtils.load_npy_range(path, 5, 2)


def test_categories_are_numbered_as_they_come_and_rare_ones_are_one(tmp_path: Path) -> None:
    days = {"day_0": [[9, 5], [7, 5]], "day_1": [[7, 6], [4, 5]]}
    for name, rows in days.items():
        np.save(tmp_path / f"{name}.npy", np.array(rows))
    BinaryCriteoUtils.sparse_to_contiguous(
        [str(tmp_path / f"{name}.npy") for name in days], str(tmp_path), frequency_threshold=2, columns=2
    )
    found = [np.load(tmp_path / f"{name}_contig_freq.npy").tolist() for name in days]
    assert found == [[[1, 2], [2, 2]], [[2, 1], [1, 2]]]


def test_rows_are_shuffled_over_days_but_the_last(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for day, rows in enumerate([range(5), range(5, 8), range(8, 9)]):
        numbers = np.array(rows)[:, None]
        for kind in ("dense", "sparse", "labels"):
            np.save(tmp_path / f"day_{day}_{kind}.npy", numbers)
    folder = str(tmp_path)
    BinaryCriteoUtils.shuffle(folder, folder, str(tmp_path / "out"), {0: 5, 1: 3, 2: 1}, days=3)
    kinds = {
        kind: [np.load(tmp_path / "out" / f"day_{day}_{kind}.npy").ravel().tolist() for day in (0, 1)]
        for kind in ("dense", "sparse", "labels")
    }
    assert kinds["dense"] == kinds["sparse"] == kinds["labels"]
    (first, second) = kinds["labels"]
    assert (len(first), sorted([*first, *second])) == (5, list(range(8)))
    assert first != list(range(5))
    with pytest.raises(sw.UnsupportedError, match="output_dir_full_set"):
        BinaryCriteoUtils.shuffle(folder, folder, folder, {0: 5}, folder, days=2)
