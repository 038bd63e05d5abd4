"""Criteo's click logs: a label, 13 integers and 26 hexadecimal strings a line, which may be missing.

Fields have tabs or commas between them, and the first line may name them (see :mod:`.columns`). Every rank reads
every line, checks it, and converts only those that fall to it. So all ranks agree, without a word, on which lines are
good, which are held out, and after which step the data ends. Nothing but a batch is in memory.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Generator, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import attrs
import numpy as np

from shardwright.errors import InvalidInputError
from shardwright_plugins.commands.demo.columns import COLUMNS, Columns
from shardwright_plugins.commands.demo.examples import NUM_CATEGORICAL, NUM_DENSE, Examples, Source, Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["HELD_OUT_EVERY", "CriteoSource", "Survey", "hash_into_rows", "parse_lines", "what_is_wrong"]

NUM_ROWS = 100_000
"""Of each table: what the strings of a column are hashed into."""

HELD_OUT_EVERY = 10
"""Every so manieth good line is not trained on but evaluated on."""

# Integers of 18 digits and strings of 16 hexadecimal ones fit 64 bits. Where some are missing, pandas writes 7 as 7.0.
_INTEGER = rb"(?:-?[0-9]{1,18}(?:\.0{1,18})?)?"
_HEX = rb"[0-9a-fA-F]{0,16}"
_GOOD_LINE = re.compile(rb"[01](?:\t%b){%d}(?:\t%b){%d}" % (_INTEGER, NUM_DENSE, _HEX, NUM_CATEGORICAL))
_GZIP_MAGIC = b"\x1f\x8b"
# What reading a file raises that is missing, cut off, or damaged amid what is packed.
_UNREADABLE = (OSError, EOFError, zlib.error)
_SHOWN_CHARACTERS = 40
_LONGEST_LINE = 100_000
_LINES_LOOKED_AT = 200_000
_PLAIN = Columns()


@attrs.frozen
class Survey:
    """Survey of files.

    Attributes:
        num_lines: Well-formed ones.
        is_exact: Whether all were read; else their number is reckoned from the first ones and the files' sizes.
        columns: How the files have their columns.
    """

    num_lines: int
    is_exact: bool
    columns: tuple[str, ...]

    @property
    def num_held_out(self) -> int:
        """Number of lines to evaluate on."""
        return self.num_lines // HELD_OUT_EVERY

    @property
    def num_training(self) -> int:
        """Number of lines to train on."""
        return self.num_lines - self.num_held_out

    def num_steps(self, batch_size: int) -> int:
        """Count the full global batches to train on."""
        return self.num_training // batch_size

    def __str__(self) -> str:
        about = "" if self.is_exact else "about "
        return f"{about}{self.num_lines:,} lines {', '.join(self.columns)}"


class CriteoSource(Source):
    """Streams examples from files, one pass to train on and one to evaluate on."""

    def __init__(
        self,
        files: Sequence[Path],
        batch_size: int,
        *,
        num_held_out: int,
        held_out_batch_size: int,
        skip_bad_lines: bool = False,
    ) -> None:
        """Look at the files.

        Args:
            files: Plain or gzip, told apart by their content; read in this order.
            batch_size: Of the global batch. What is left at the end and fills no batch is not trained on.
            num_held_out: How many examples to evaluate on at most, the first of the held-out ones.
            held_out_batch_size: Of the global batches of these.
            skip_bad_lines: Count malformed lines and go on, instead of raising.

        Raises:
            InvalidInputError: If a file is missing, unreadable, no file, or empty.
        """
        self.tables = tuple(Table(f"cat_{index}", NUM_ROWS) for index in range(NUM_CATEGORICAL))
        self._files = tuple(files)
        self._batch_size = batch_size
        self._num_held_out = num_held_out
        self._held_out_batch_size = held_out_batch_size
        self._skip_bad_lines = skip_bad_lines
        self._num_bad_lines = 0
        self._columns = tuple(_columns_of(file) for file in self._files)

    def look(self) -> Survey:
        """Read the first lines, all where there are few: what the files allow is known before work begins.

        Raises:
            InvalidInputError: If a line among them is malformed, and such lines are not to be skipped.
        """
        place = _Place()
        lines = self._good_lines(place)
        num_lines = sum(1 for _ in islice(lines, _LINES_LOOKED_AT))
        is_exact = next(lines, None) is None
        if not is_exact:
            part = place.num_bytes / sum(file.stat().st_size for file in self._files)
            num_lines = round(num_lines / min(part, 1.0))
            lines.close()
        return Survey(num_lines, is_exact, tuple(dict.fromkeys(map(str, self._columns))))

    @property
    def num_bad_lines(self) -> int:
        """Number of malformed lines that the longest pass so far has left out."""
        return self._num_bad_lines

    def training_batches(self, rank: int, world_size: int) -> Iterator[Examples]:
        """Every `world_size`-th example of each full global batch, once over the files.

        Raises:
            InvalidInputError: If a line is malformed, or there are too few lines for one batch.
        """
        batches = self._batches(rank, world_size, self._batch_size, held_out=False)
        num_batches = 0
        for count, mine in batches:
            if count == self._batch_size:
                num_batches += 1
                yield parse_lines(mine)
            elif num_batches == 0:
                raise too_few_to_train(count, self._batch_size, self._num_bad_lines)

    def held_out_batches(self, rank: int, world_size: int) -> Iterator[Examples]:
        """Every `world_size`-th example of each batch of held-out ones, the last batch partly filled.

        Raises:
            InvalidInputError: If a line is malformed, or no line is held out.
        """
        remaining = self._num_held_out
        for count, mine in self._batches(rank, world_size, self._held_out_batch_size, held_out=True):
            if count == 0 and remaining == self._num_held_out:
                raise none_held_out()
            yield parse_lines(mine)
            remaining -= count
            if remaining <= 0:
                return

    def _batches(
        self, rank: int, world_size: int, batch_size: int, *, held_out: bool
    ) -> Iterator[tuple[int, list[bytes]]]:
        """(examples of the global batch, the lines of this rank), the last with what is left, if only 0."""
        lines = (
            line
            for number, line in enumerate(self._good_lines())
            if (number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == held_out
        )
        count = batch_size
        while count == batch_size:
            batch = list(islice(lines, batch_size))
            count = len(batch)
            yield count, batch[rank::world_size]

    def _good_lines(self, place: _Place | None = None) -> Generator[bytes]:
        """The lines of all files that are well formed, with tabs, in Criteo's order.

        Args:
            place: Is told how far this pass has come.

        Raises:
            InvalidInputError: On the first that is not, unless such lines are to be skipped.
        """
        num_bad_lines = 0
        for file, columns in zip(self._files, self._columns, strict=True):
            lines = enumerate(_lines(file, place or _Place()), start=1)
            for number, line in islice(lines, int(columns.has_header), None):
                normal = columns.normal(line)
                if _GOOD_LINE.fullmatch(normal):
                    yield normal
                    continue
                if not self._skip_bad_lines:
                    raise InvalidInputError(
                        f"{file}:{number}: {what_is_wrong(line, columns)}. --skip-bad-lines leaves out such lines."
                    )
                num_bad_lines += 1
                self._num_bad_lines = max(self._num_bad_lines, num_bad_lines)


def too_few_to_train(count: int, batch_size: int, num_bad_lines: int) -> InvalidInputError:
    """The error for data that do not fill one batch."""
    left_out = f"; {num_bad_lines} malformed ones are left out" if num_bad_lines else ""
    return InvalidInputError(
        f"the data has {count} good lines to train on (one in {HELD_OUT_EVERY} is held out{left_out}), too "
        f"few for one batch of {batch_size}. Give more data, or a smaller --batch-size."
    )


def none_held_out() -> InvalidInputError:
    """The error for data of which nothing is held out."""
    return InvalidInputError(
        f"the data has fewer than {HELD_OUT_EVERY} good lines: none is held out to evaluate on."
    )


def what_is_wrong(line: bytes, columns: Columns = _PLAIN) -> str:
    """Say what is wrong with a malformed line; an empty text if nothing is.

    Args:
        line: Without its line end.
        columns: Of its file.
    """
    wrong_number = columns.wrong_number(line)
    if wrong_number:
        return wrong_number
    fields = columns.normal(line).split(b"\t")
    if fields[0] not in (b"0", b"1"):
        return f"{columns.name(0)}, the label, must be 0 or 1, got {_shown(fields[0])}"
    for place, field in enumerate(fields[1 : 1 + NUM_DENSE], start=1):
        if not re.fullmatch(_INTEGER, field):
            return f"{columns.name(place)} must be an integer of at most 18 digits or missing, got {_shown(field)}"
    for place, field in enumerate(fields[1 + NUM_DENSE :], start=1 + NUM_DENSE):
        if not re.fullmatch(_HEX, field):
            return (
                f"{columns.name(place)} must be at most 16 hexadecimal digits or missing, got {_shown(field)}"
            )
    return ""


def parse_lines(lines: Sequence[bytes]) -> Examples:
    """Convert well-formed lines: `log(1 + max(x, 0))` of the integers, rows of tables for the strings.

    A missing integer counts as 0. A missing string has row 0 of its table to itself: that something
    is missing says something too.
    """
    fields = [line.split(b"\t") for line in lines]
    dense = [[float(field or b"0") for field in row[1 : 1 + NUM_DENSE]] for row in fields]
    strings = [row[column] for column in range(1 + NUM_DENSE, len(COLUMNS)) for row in fields]
    values = np.array([int(field or b"0", 16) for field in strings], dtype=np.uint64)
    rows = hash_into_rows(values.reshape(NUM_CATEGORICAL, len(lines)), NUM_ROWS).ravel()
    rows[np.array([not field for field in strings], dtype=bool)] = 0
    integers = np.array(dense, dtype=np.float64).reshape(len(lines), NUM_DENSE)
    return Examples(
        dense=np.log1p(np.maximum(integers, 0.0)).astype(np.float32),
        lengths=np.ones((NUM_CATEGORICAL, len(lines)), dtype=np.int32),
        ids=rows,
        labels=np.array([row[0] == b"1" for row in fields], dtype=np.float32),
    )


def hash_into_rows(values: NDArray[np.uint64], num_rows: int) -> NDArray[np.int64]:
    """Rows 1 to `num_rows - 1` for the values of each column, the same on every machine, in every release.

    The hash is the finaliser of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
    generators"), begun at another place for each column.

    Args:
        values: [T, B] the numbers that the strings spell.
        num_rows: Of each table. Row 0 is not given: it stands for what is missing.

    Returns:
        [T, B] rows.
    """
    columns = np.arange(1, len(values) + 1, dtype=np.uint64)[:, None]
    mixed = values + columns * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    rows: NDArray[np.int64] = (mixed % np.uint64(num_rows - 1)).astype(np.int64) + 1
    return rows


def _columns_of(file: Path) -> Columns:
    """Read the column layout of a file.

    Raises:
        InvalidInputError: If it is missing, unreadable, no file, or empty, or lacks columns.
    """
    if not file.is_file():
        why = "is no file" if file.exists() else "there is no such file"
        raise InvalidInputError(f"--data {file}: {why}.")
    try:
        with _open(file) as stream:
            first_line = stream.readline(_LONGEST_LINE)
    except _UNREADABLE as error:
        raise InvalidInputError(f"--data {file}: cannot be read: {error}.") from error
    if not first_line:
        raise InvalidInputError(f"--data {file}: is empty.")
    return Columns.of(first_line.rstrip(b"\r\n"), f"--data {file}")


def _open(file: Path) -> IO[bytes] | gzip.GzipFile:
    with file.open("rb") as stream:
        is_gzip = stream.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    return gzip.open(file, "rb") if is_gzip else file.open("rb")


@attrs.define
class _Place:
    """Position of a pass over the files.

    Attributes:
        bytes_before: Of the files that were read.
        stream: The file that is read.
    """

    bytes_before: int = 0
    stream: Any = None

    @property
    def num_bytes(self) -> int:
        """Bytes read of the files as they are on disk; a little more than was given out."""
        packed: int = getattr(self.stream, "fileobj", self.stream).tell()
        return self.bytes_before + packed


def _lines(file: Path, place: _Place) -> Iterator[bytes]:
    """The lines of a file without their ends.

    Raises:
        InvalidInputError: If the file cannot be read to its end.
    """
    number = 0
    try:
        with _open(file) as place.stream:
            for number, line in enumerate(place.stream, start=1):  # noqa: B007
                yield line.rstrip(b"\r\n")
        place.bytes_before += file.stat().st_size
    except _UNREADABLE as error:
        raise InvalidInputError(f"{file}: cannot be read after line {number}: {error}") from error


def _shown(field: bytes) -> str:
    text = field.decode("utf-8", errors="replace")
    return repr(text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "...")
