"""Column layout of a file of Criteo's click logs: tabs or commas, with a header or without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from shardwright.errors import InvalidInputError
from shardwright_plugins.commands.demo.examples import NUM_CATEGORICAL, NUM_DENSE

__all__ = ["COLUMNS", "Columns"]

COLUMNS = (
    "label",
    *(f"I{number}" for number in range(1, NUM_DENSE + 1)),
    *(f"C{number}" for number in range(1, NUM_CATEGORICAL + 1)),
)
"""Criteo's names, in the order of a line without a header."""

# TorchRec's names count from 0.
_OTHER_NAMES = {
    **{f"int_{number}": f"i{number + 1}" for number in range(NUM_DENSE)},
    **{f"cat_{number}": f"c{number + 1}" for number in range(NUM_CATEGORICAL)},
}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@attrs.frozen
class Columns:
    """The columns of one file.

    Attributes:
        separator: between fields: a tab or a comma.
        num_fields: number of fields of a line.
        order: place in a line of the label, the integers and the strings, in this order.
        has_header: true if the first line names the columns.
    """

    separator: bytes = b"\t"
    num_fields: int = len(COLUMNS)
    order: tuple[int, ...] = tuple(range(len(COLUMNS)))
    has_header: bool = False

    @classmethod
    def of(cls, first_line: bytes, file: object) -> Columns:
        """Read the columns of a file.

        Args:
            first_line: Of it, without its line end.
            file: What it is called, for errors.

        Raises:
            InvalidInputError: If it has a header that lacks columns; names them.
        """
        separator = b"\t" if b"\t" in first_line or b"," not in first_line else b","
        line = first_line.removeprefix(_BYTE_ORDER_MARK).replace(b'"', b"").lower()
        names = [name.strip().decode(errors="replace") for name in line.split(separator)]
        places = {_OTHER_NAMES.get(name, name): place for place, name in enumerate(names)}
        if not any(name.lower() in places for name in COLUMNS):
            return cls(separator)
        return cls(separator, len(names), _order(places, file), has_header=True)

    def normal(self, line: bytes) -> bytes:
        """A line as one with tabs and all columns in Criteo's order; none at all if it has other than these fields."""
        if self == _PLAIN:
            return line
        fields = self._fields(line)
        return b"\t".join([fields[place] for place in self.order]) if len(fields) == self.num_fields else b""

    def wrong_number(self, line: bytes) -> str:
        """Explain what is wrong with the number of fields of a line; empty if nothing is."""
        got = len(self._fields(line))
        if got == self.num_fields:
            return ""
        expected = (
            f"{self.num_fields} fields, as the header has,"
            if self.has_header
            else f"{self.num_fields} fields (a label, {NUM_DENSE} integers, {NUM_CATEGORICAL} hexadecimal strings)"
        )
        return f"expected {expected} with {self.separator_name} between them, got {got}"

    def name(self, place: int) -> str:
        """Name a column of Criteo's order for errors."""
        return f"column {COLUMNS[place]}" if self.has_header else f"field {place + 1}"

    @property
    def separator_name(self) -> str:
        """``tabs`` or ``commas``."""
        return "tabs" if self.separator == b"\t" else "commas"

    def __str__(self) -> str:
        return f"with {self.separator_name} and {'a' if self.has_header else 'no'} header"

    def _fields(self, line: bytes) -> list[bytes]:
        unquoted = line if self.separator == b"\t" else line.replace(b'"', b"")  # no field holds a comma
        return unquoted.split(self.separator)


_PLAIN = Columns()


def _order(places: Mapping[str, int], file: object) -> tuple[int, ...]:
    missing = [name for name in COLUMNS if name.lower() not in places]
    if missing:
        raise InvalidInputError(
            f"{file}: its header lacks {_some(missing)}. Columns are called label, I1 to I{NUM_DENSE} and C1 to "
            f"C{NUM_CATEGORICAL}, in any order and beside others; a file without a header has these {len(COLUMNS)} in "
            "this order."
        )
    return tuple(places[name.lower()] for name in COLUMNS)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
