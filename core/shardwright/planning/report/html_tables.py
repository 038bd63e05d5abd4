"""Tables of HTML whose cells may carry a number to sort by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from attrs import frozen


@frozen
class Cell:
    """One cell.

    Args:
        text: text of the cell.
        value: number that the cell is sorted by, if it has one.
        is_long: its text may have several lines.
        before: HTML before its text.
        after: HTML after its text.
    """

    text: str
    value: float | None = None
    is_long: bool = False
    before: str = ""
    after: str = ""

    def html(self) -> str:
        """The cell."""
        number = f' class="n" data-v="{self.value:.10g}"' if self.value is not None else ""
        kind = ' class="text"' if self.is_long else number
        return f"<td{kind}>{self.before}{escape(self.text)}{self.after}</td>"


def table(name: str, header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A table that can be sorted and searched, in a frame of its own.

    Args:
        name: its id.
        header: a column's name each.
        rows: their cells; a column whose cells have values is one of numbers.
    """
    return f'<div class="scroll">{_table(name, "sortable", header, rows)}</div>\n'


def short_table(name: str, header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A table of few rows, that stays as it is."""
    return f'<div class="whole">{_table(name, "short", header, rows)}</div>\n'


def _table(name: str, kind: str, header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    listed = list(rows)
    is_number = [bool(listed) and listed[0][column].value is not None for column in range(len(header))]
    heads = "".join(
        f"<th{' class=n' if number else ''}>{escape(text)}</th>"
        for text, number in zip(header, is_number, strict=True)
    )
    lines = "".join(f"<tr>{''.join(cell.html() for cell in row)}</tr>\n" for row in listed)
    return f'<table class="{kind}" id="{escape(name)}"><thead><tr>{heads}</tr></thead><tbody>\n{lines}</tbody></table>'


def bar(part: float, colour: str) -> str:
    """A bar that fills a part of its cell."""
    return f'<span class="bar"><b style="background:{colour};width:{100 * min(1.0, part):.1f}%"></b></span>'


def dot(colour: str) -> str:
    """A small square."""
    return f'<i class="dot" style="background:{colour}"></i>'
