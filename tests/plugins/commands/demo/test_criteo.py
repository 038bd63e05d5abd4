"""Criteo's format: what is read, what is refused, and who gets which line."""

from __future__ import annotations

import gzip
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import InvalidInputError
from shardwright_plugins.commands.demo.criteo import (
    _GOOD_LINE,
    NUM_ROWS,
    CriteoSource,
    hash_into_rows,
    parse_lines,
    what_is_wrong,
)
from shardwright_plugins.commands.demo.examples import Examples

MASK = 2**64 - 1


def line_of(number: int, label: str = "0") -> str:
    """A good line, told apart by its first integer."""
    return "\t".join([label, str(number), *["7"] * 12, *[f"{number:08x}"] * 26])


def with_field(place: int, text: str) -> str:
    """A good line but for field `place`, counted from 1."""
    fields = line_of(5).split("\t")
    fields[place - 1] = text
    return "\t".join(fields)


def write(path: Path, lines: Sequence[str], end: str = "\n") -> Path:
    path.write_bytes("".join(line + end for line in lines).encode())
    return path


def source_of(
    *files: Path,
    batch_size: int = 4,
    skip: bool = False,
    num_held_out: int = 1000,
    held_out_batch_size: int = 4,
) -> CriteoSource:
    return CriteoSource(
        files,
        batch_size,
        num_held_out=num_held_out,
        held_out_batch_size=held_out_batch_size,
        skip_bad_lines=skip,
    )


def numbers_in(examples: Examples) -> list[int]:
    """What `line_of` was called with."""
    return np.expm1(examples.dense[:, 0].astype(np.float64)).round().astype(int).tolist()


def trained_on(source: CriteoSource, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    return [numbers_in(batch) for batch in source.training_batches(rank, world_size)]


def splitmix64(value: int) -> int:
    """The finaliser, in Python's integers."""
    value &= MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def test_parse_lines_values_are_transformed() -> None:
    line = "\t".join(["1", "3", "-2", "", *["0"] * 10, "0000000a", "", *["A"] * 24]).encode()
    examples = parse_lines([line])
    expected = [math.log(4), 0.0, 0.0, *[0.0] * 10]
    np.testing.assert_allclose(examples.dense, [expected], rtol=1e-6)
    assert examples.labels.tolist() == [1.0]
    assert examples.lengths.tolist() == [[1]] * 26
    assert examples.ids[1] == 0
    assert examples.true_logits is None


def test_parse_lines_missing_string_has_a_row_of_its_own() -> None:
    zero, missing = (with_field(20, text).encode() for text in ("0", ""))
    ids = parse_lines([zero, missing]).ids.reshape(26, 2)
    assert ids[5, 0] != 0
    assert ids[5, 1] == 0


def test_parse_lines_case_and_leading_zeros_do_not_matter() -> None:
    ids = parse_lines([with_field(15, text).encode() for text in ("00ab", "AB")]).ids.reshape(26, 2)
    assert ids[0, 0] == ids[0, 1]


def test_parse_lines_none_gives_empty_arrays() -> None:
    none = parse_lines([])
    assert none.dense.shape == (0, 13)
    assert none.lengths.shape == (26, 0)
    assert none.ids.dtype == np.int64
    assert len(none) == 0


@settings(max_examples=200)
@given(st.lists(st.integers(0, MASK), min_size=26, max_size=26), st.integers(2, 10**6))
def test_hash_into_rows_equals_splitmix64(values: list[int], num_rows: int) -> None:
    rows = hash_into_rows(np.array(values, dtype=np.uint64)[:, None], num_rows)
    expected = [
        splitmix64(value + (column + 1) * 0x9E3779B97F4A7C15) % (num_rows - 1) + 1
        for column, value in enumerate(values)
    ]
    assert rows[:, 0].tolist() == expected


def test_hash_into_rows_stays_what_it_was() -> None:
    # Models were trained with these rows: they may never change.
    values = np.array([[0, 1, 0x68FD1E64], [0, 1, 0x68FD1E64]], dtype=np.uint64)
    assert hash_into_rows(values, NUM_ROWS).tolist() == [[11258, 46563, 11802], [14257, 77462, 13505]]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("\t".join(["0"] * 39), "expected 40 fields .* got 39$"),
        ("\t".join(["0"] * 41), "expected 40 fields .* got 41$"),
        ("", "expected 40 fields .* got 1$"),
        (with_field(1, "2"), "field 1, the label, must be 0 or 1, got '2'"),
        (with_field(1, ""), "field 1, the label, must be 0 or 1, got ''"),
        (with_field(2, "1.5"), r"field 2 must be an integer .* got '1\.5'"),
        (with_field(14, "x"), "field 14 must be an integer .* got 'x'"),
        (with_field(14, "1" * 19), "field 14 must be an integer of at most 18 digits"),
        (with_field(15, "xyz"), "field 15 must be at most 16 hexadecimal digits .* got 'xyz'"),
        (with_field(40, "0" * 17), "field 40 must be at most 16 hexadecimal digits"),
        (with_field(40, "g" * 100), r"got 'g{40}\.\.\.'"),
        (with_field(3, " 1"), "field 3 must be an integer .* got ' 1'"),
    ],
)
def test_bad_line_error_has_file_line_and_reason(tmp_path: Path, line: str, wrong: str) -> None:
    good = write(tmp_path / "good.tsv", [line_of(n) for n in range(3)])
    bad = write(tmp_path / "bad.tsv", [line_of(8), line])
    with pytest.raises(
        InvalidInputError, match=rf"bad\.tsv:2: .*{wrong[:-1] if wrong[-1] == '$' else wrong}"
    ):
        trained_on(source_of(good, bad))
    assert re.search(wrong, what_is_wrong(line.encode()))


FIELDS = st.text("0123456789abcdefABCDEFx -.", max_size=20) | st.integers(-(10**19), 10**19).map(str)


@settings(max_examples=500)
@given(
    changed=st.dictionaries(st.integers(0, 39), FIELDS, max_size=3),
    tail=st.sampled_from([[], [], [], ["0"]]),
)
def test_what_is_wrong_says_something_exactly_of_refused_lines(
    changed: dict[int, str], tail: list[str]
) -> None:
    fields = line_of(5).split("\t")
    for place, text in changed.items():
        fields[place] = text
    line = "\t".join([*fields, *tail]).encode()
    assert bool(what_is_wrong(line)) == (_GOOD_LINE.fullmatch(line) is None)
    if not what_is_wrong(line):
        examples = parse_lines([line])
        integers = [int(float(text or "0")) for text in fields[1:14]]
        np.testing.assert_allclose(examples.dense[0], [math.log1p(max(n, 0)) for n in integers], rtol=1e-6)
        strings = fields[14:]
        assert [row == 0 for row in examples.ids] == [text == "" for text in strings]


def test_source_skipping_counts_bad_lines_and_goes_on(tmp_path: Path) -> None:
    lines = [line_of(n) for n in range(9)]
    lines[2:2] = ["bad", with_field(1, "9")]
    source = source_of(write(tmp_path / "a.tsv", lines), skip=True)
    assert trained_on(source) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert source.num_bad_lines == 2
    source = source_of(write(tmp_path / "b.tsv", [*lines, line_of(9)]), skip=True)
    assert [numbers_in(batch) for batch in source.held_out_batches(0, 1)] == [[9]]
    assert source.num_bad_lines == 2


def test_source_files_plain_and_gzip_are_one_stream(tmp_path: Path) -> None:
    plain = write(tmp_path / "a.tsv", [line_of(n) for n in range(6)], end="\r\n")
    packed = tmp_path / "b.tsv"  # told apart by content, not by name
    packed.write_bytes(gzip.compress("\n".join(line_of(n) for n in range(6, 14)).encode()))
    source = source_of(plain, packed)
    assert trained_on(source) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 10, 11, 12]]
    assert [numbers_in(batch) for batch in source.held_out_batches(0, 1)] == [[9]]


@pytest.mark.parametrize("world_size", [2, 3])
def test_source_ranks_take_alternate_examples_in_as_many_steps(tmp_path: Path, world_size: int) -> None:
    file = write(tmp_path / "a.tsv", [line_of(n) for n in range(47)])
    source = source_of(file, batch_size=7, held_out_batch_size=7)
    alone = trained_on(source)
    assert [n for batch in alone for n in batch] == [n for n in range(47) if n % 10 != 9][:42]
    for rank in range(world_size):
        assert trained_on(source, rank, world_size) == [batch[rank::world_size] for batch in alone]
    held_out = [
        [numbers_in(batch) for batch in source.held_out_batches(rank, world_size)]
        for rank in range(world_size)
    ]
    assert held_out == [[[9, 19, 29, 39][rank::world_size]] for rank in range(world_size)]


def test_source_held_out_limit_ends_the_pass(tmp_path: Path) -> None:
    file = write(tmp_path / "a.tsv", [line_of(n) for n in range(100)])
    source = source_of(file, batch_size=7, num_held_out=3, held_out_batch_size=2)
    assert [numbers_in(batch) for batch in source.held_out_batches(0, 1)] == [[9, 19], [29, 39]]


def test_source_streams_without_reading_ahead(tmp_path: Path) -> None:
    file = write(tmp_path / "a.tsv", [*[line_of(n) for n in range(8)], "bad"])
    batches = source_of(file).training_batches(0, 1)
    assert numbers_in(next(batches)) == [0, 1, 2, 3]
    assert numbers_in(next(batches)) == [4, 5, 6, 7]
    with pytest.raises(InvalidInputError, match=r"a\.tsv:9"):
        next(batches)


def test_source_fewer_lines_than_a_batch_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path / "a.tsv", [line_of(n) for n in range(12)])
    with pytest.raises(InvalidInputError, match=r"has 11 good lines to train on .* one batch of 12\."):
        trained_on(source_of(file, batch_size=12))


def test_source_nothing_held_out_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path / "a.tsv", [line_of(n) for n in range(9)])
    with pytest.raises(InvalidInputError, match="none is held out"):
        list(source_of(file).held_out_batches(0, 1))


def test_source_missing_file_folder_and_empty_file_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="nowhere: there is no such file"):
        source_of(tmp_path / "nowhere")
    with pytest.raises(InvalidInputError, match="is no file"):
        source_of(tmp_path)
    for name, content in (("empty", b""), ("empty.gz", gzip.compress(b""))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InvalidInputError, match=f"{name}: is empty"):
            source_of(tmp_path / name)


def test_source_cut_gzip_is_an_error_with_the_last_line(tmp_path: Path) -> None:
    packed = gzip.compress("".join(line_of(n) + "\n" for n in range(2000)).encode())
    (tmp_path / "cut.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(InvalidInputError, match=r"cut\.gz: cannot be read after line \d+"):
        trained_on(source_of(tmp_path / "cut.gz"))


@pytest.mark.parametrize("size", [2, 5, 9])
def test_source_gzip_that_ends_in_its_first_bytes_is_an_error_naming_it(tmp_path: Path, size: int) -> None:
    (tmp_path / "stub.gz").write_bytes(gzip.compress(line_of(1).encode())[:size])
    with pytest.raises(InvalidInputError, match=r"--data .*stub\.gz: cannot be read: Compressed file ended"):
        source_of(tmp_path / "stub.gz")


def damaged_gzip(lines: Sequence[str]) -> bytes:
    """Packed lines whose first bytes behind the header are no packed data."""
    packed = bytearray(gzip.compress("".join(line + "\n" for line in lines).encode()))
    packed[10:20] = b"\xff" * 10
    return bytes(packed)


def test_source_damaged_gzip_is_an_error_naming_it(tmp_path: Path) -> None:
    (tmp_path / "damaged.gz").write_bytes(damaged_gzip([line_of(1)]))
    with pytest.raises(InvalidInputError, match=r"damaged\.gz: cannot be read: Error -3 while decompressing"):
        source_of(tmp_path / "damaged.gz")


def test_source_gzip_damaged_further_on_is_an_error_with_the_last_line(tmp_path: Path) -> None:
    good = gzip.compress("".join(line_of(n) + "\n" for n in range(6)).encode())
    (tmp_path / "damaged.gz").write_bytes(good + damaged_gzip([line_of(6)]))
    with pytest.raises(InvalidInputError, match=r"damaged\.gz: cannot be read after line \d: Error -3"):
        trained_on(source_of(tmp_path / "damaged.gz"))


# As DeepCTR's sample of Criteo has it: written by pandas, with a header.
HEADER = ["label", *(f"I{number}" for number in range(1, 14)), *(f"C{number}" for number in range(1, 27))]
NUMBERS = list(range(23))


def pandas_line(number: int, names: Sequence[str], separator: str = ",") -> str:
    """The line of `line_of(number)` with its columns in another order, and integers as pandas writes them."""
    fields = dict(zip(HEADER, line_of(number).split("\t"), strict=True))
    fields |= {name: f"{fields[name]}.0" for name in HEADER[1:14]}
    return separator.join(fields.get(name, "999") for name in names)


def layouts_of_files() -> dict[str, list[str]]:
    shuffled = ["Id", *HEADER[::-1]]
    torchrec = ["label", *(f"int_{n}" for n in range(13)), *(f"cat_{n}" for n in range(26))]
    return {
        "commas": [pandas_line(n, HEADER) for n in NUMBERS],
        "commas and header": [",".join(HEADER), *(pandas_line(n, HEADER) for n in NUMBERS)],
        "tabs and header": ["\t".join(HEADER), *(pandas_line(n, HEADER, "\t") for n in NUMBERS)],
        "another order": [",".join(shuffled), *(pandas_line(n, shuffled) for n in NUMBERS)],
        "capitals": [",".join(HEADER).replace("label", "Label"), *(pandas_line(n, HEADER) for n in NUMBERS)],
        "torchrec's names": [",".join(torchrec), *(pandas_line(n, HEADER) for n in NUMBERS)],
        "quotes": [
            ",".join(f'"{name}"' for name in HEADER),
            *(",".join(f'"{field}"' for field in pandas_line(n, HEADER).split(",")) for n in NUMBERS),
        ],
        "byte order mark": ["\ufeff" + ",".join(HEADER), *(pandas_line(n, HEADER) for n in NUMBERS)],
    }


@pytest.mark.parametrize("name", layouts_of_files())
def test_source_files_of_any_columns_are_read_as_criteos_own(tmp_path: Path, name: str) -> None:
    own = source_of(write(tmp_path / "own.tsv", [line_of(n) for n in NUMBERS]))
    other = source_of(write(tmp_path / "other.csv", layouts_of_files()[name], end="\r\n"))
    for expected, got in zip(own.training_batches(0, 1), other.training_batches(0, 1), strict=True):
        np.testing.assert_array_equal(got.dense, expected.dense)
        np.testing.assert_array_equal(got.ids, expected.ids)
        np.testing.assert_array_equal(got.labels, expected.labels)
    assert [numbers_in(batch) for batch in other.held_out_batches(0, 1)] == [[9, 19]]
    assert other.look().num_lines == len(NUMBERS)


@pytest.mark.parametrize("packed", [False, True])
def test_source_files_of_different_columns_are_one_stream(tmp_path: Path, packed: bool) -> None:
    plain = write(tmp_path / "a.tsv", [line_of(n) for n in range(3)])
    lines = [",".join(HEADER), *(pandas_line(n, HEADER) for n in range(3, 9))]
    other = write(tmp_path / "b.csv", lines)
    if packed:
        other.write_bytes(gzip.compress(other.read_bytes()))
    source = source_of(plain, other)
    assert trained_on(source) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert str(source.look()) == "9 lines with tabs and no header, with commas and a header"


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (
            pandas_line(5, HEADER) + ",1",
            r"expected 40 fields, as the header has, with commas between them, got 41",
        ),
        (pandas_line(5, HEADER).replace("5.0", "5.5"), r"column I1 must be an integer .* got '5\.5'"),
        (pandas_line(5, HEADER).replace("0,", "2,", 1), r"column label, the label, must be 0 or 1, got '2'"),
        (line_of(5), r"expected 40 fields, as the header has, with commas between them, got 1"),
    ],
)
def test_bad_line_below_a_header_is_told_by_columns(tmp_path: Path, line: str, wrong: str) -> None:
    file = write(tmp_path / "a.csv", [",".join(HEADER), pandas_line(1, HEADER), line])
    with pytest.raises(InvalidInputError, match=rf"a\.csv:3: {wrong}"):
        trained_on(source_of(file))


def test_header_of_which_columns_are_missing_is_an_error_that_names_them(tmp_path: Path) -> None:
    names = [name for name in HEADER if name not in ("label", "C7")]
    file = write(tmp_path / "test.csv", [",".join(names), pandas_line(1, names)])
    with pytest.raises(
        InvalidInputError, match=r"test\.csv: its header lacks label, C7\. Columns are called"
    ):
        source_of(file)
