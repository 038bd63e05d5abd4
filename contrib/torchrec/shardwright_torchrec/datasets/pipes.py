"""Data pipes of text files, and their parts for training and validation."""

from __future__ import annotations

import csv
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import IterDataPipe, functional_datapipe, get_worker_info

import shardwright as sw
from shardwright_torchrec.names import is_installed

__all__ = [
    "Limit",
    "LoadFiles",
    "ParallelReadConcat",
    "ReadLinesFromCSV",
    "idx_split_train_val",
    "rand_split_train_val",
    "train_filter",
    "val_filter",
]

Items = Iterable[Any]


class LoadFiles(IterDataPipe):  # type: ignore[type-arg]  # of paths and files
    """Opened files, with their paths.

    Args:
        datapipe: paths.
        mode: `"b"` for bytes; `"r"` or `"t"` for text; others as of `open`.
        length: number of files, for `len`; -1: unknown.
        path_manager_key: not needed: files are on disk.
        open_kw: further arguments of `open`.
    """

    def __init__(
        self,
        datapipe: Iterable[str],
        mode: str = "b",
        length: int = -1,
        path_manager_key: str = "torchrec",
        **open_kw: Any,
    ) -> None:
        self.datapipe, self.length, self.open_kw = datapipe, length, open_kw
        self.mode = mode if mode[:1] in "rwax" else f"r{mode}"

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for path in self.datapipe:
            with open(path, self.mode, **self.open_kw) as file:
                yield path, file

    def __len__(self) -> int:
        if self.length < 0:
            raise sw.InvalidInputError("LoadFiles has no length: give it length=")
        return self.length


class Limit(IterDataPipe):  # type: ignore[type-arg]  # of whatever it limits
    """The first items of an iterable; where `torchrec` is this package, `datapipe.limit(...)` of any data pipe too.

    Args:
        datapipe: the iterable.
        limit: most items.
    """

    def __init__(self, datapipe: Iterable[Any], limit: int) -> None:
        self.datapipe, self.limit = datapipe, limit

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.datapipe, self.limit)


if is_installed() and "limit" not in IterDataPipe.functions:
    functional_datapipe("limit")(Limit)


class ReadLinesFromCSV(IterDataPipe):  # type: ignore[type-arg]  # of lists of cells
    """Cells of the lines of text files.

    Args:
        datapipe: pairs of a path and an opened file.
        skip_first_line: leave out the first line of each file.
        kw: arguments of `csv.reader`.
    """

    def __init__(self, datapipe: Iterable[tuple[str, Any]], skip_first_line: bool = False, **kw: Any) -> None:
        self.datapipe, self.skip_first_line, self.kw = datapipe, skip_first_line, kw

    def __iter__(self) -> Iterator[list[str]]:
        for _, file in self.datapipe:
            lines = csv.reader(file, **self.kw)
            if self.skip_first_line:
                next(lines, None)
            yield from lines


def _of_this_worker(datapipes: Sequence[Items]) -> Sequence[Items]:
    """A run of the data pipes in a data loader's worker, all of them elsewhere; the first workers have one more."""
    worker = get_worker_info()
    if worker is None:
        return datapipes
    if worker.num_workers > len(datapipes):
        raise sw.InvalidInputError(
            f"{worker.num_workers} workers share {len(datapipes)} data pipes: some would have none"
        )
    share, rest = divmod(len(datapipes), worker.num_workers)
    first = worker.id * share + min(worker.id, rest)
    return datapipes[first : first + share + (worker.id < rest)]


class ParallelReadConcat(IterDataPipe):  # type: ignore[type-arg]  # of what the data pipes give
    """Data pipes one after the other, dealt to the workers of a data loader.

    Args:
        datapipes: the data pipes.
        dp_selector: function of all data pipes that gives a worker's.
    """

    def __init__(
        self, *datapipes: Items, dp_selector: Callable[[Sequence[Items]], Sequence[Items]] = _of_this_worker
    ) -> None:
        self.datapipes, self.dp_selector = datapipes, dp_selector

    def __iter__(self) -> Iterator[Any]:
        for datapipe in self.dp_selector(self.datapipes):
            yield from datapipe


class _Chosen(IterDataPipe):  # type: ignore[type-arg]  # of what the data pipe gives
    """The items of a data pipe whose number passes; the choice begins anew with each pass."""

    def __init__(self, datapipe: Items, choice: Callable[[], Callable[[int], bool]]) -> None:
        self._datapipe, self._choice = datapipe, choice

    def __iter__(self) -> Iterator[Any]:
        is_chosen = self._choice()
        return (item for number, item in enumerate(self._datapipe) if is_chosen(number))


def _checked(train_perc: float) -> None:
    if not 0.0 < train_perc < 1.0:
        raise sw.InvalidInputError(f"train_perc must be in range (0.0, 1.0), got {train_perc}")


def train_filter(key_fn: Callable[[int], int], train_perc: float, decimal_places: int, idx: int) -> bool:
    """True for items of the training part, by the last digits of a key.

    Args:
        key_fn: function of an item's number that gives its key.
        train_perc: share of the training part, 0 to 1.
        decimal_places: digits that are looked at.
        idx: number of the item.
    """
    return key_fn(idx) % 10**decimal_places < round(train_perc * 10**decimal_places)


def val_filter(key_fn: Callable[[int], int], train_perc: float, decimal_places: int, idx: int) -> bool:
    """True for items of the validation part; see `train_filter`."""
    return not train_filter(key_fn, train_perc, decimal_places, idx)


def _itself(number: int) -> int:
    return number


def idx_split_train_val(
    datapipe: Items,
    train_perc: float,
    decimal_places: int = 2,
    key_fn: Callable[[int], int] = _itself,
) -> tuple[IterDataPipe[Any], IterDataPipe[Any]]:
    """Parts for training and validation, by the numbers of the items.

    Args:
        datapipe: the items.
        train_perc: share of the training part, 0 to 1.
        decimal_places: last digits of a key that are looked at.
        key_fn: function of an item's number that gives its key.

    Raises:
        InvalidInputError: the share is not between 0 and 1.
    """
    _checked(train_perc)

    def trains(number: int) -> bool:
        return train_filter(key_fn, train_perc, decimal_places, number)

    return _Chosen(datapipe, lambda: trains), _Chosen(datapipe, lambda: lambda number: not trains(number))


def rand_split_train_val(
    datapipe: Items, train_perc: float, random_seed: int = 0
) -> tuple[IterDataPipe[Any], IterDataPipe[Any]]:
    """Random parts for training and validation, the same in each pass.

    Args:
        datapipe: the items.
        train_perc: share of the training part, 0 to 1.
        random_seed: seed of the choice.

    Raises:
        InvalidInputError: the share is not between 0 and 1.
    """
    _checked(train_perc)

    def chooses(trains: bool) -> Callable[[], Callable[[int], bool]]:
        def begin() -> Callable[[int], bool]:
            draws = random.Random(random_seed)
            return lambda number: (draws.random() < train_perc) == trains

        return begin

    return _Chosen(datapipe, chooses(True)), _Chosen(datapipe, chooses(False))
