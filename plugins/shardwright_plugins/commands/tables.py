"""Tables that commands print."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def table_of(*headers: str, right: Collection[str] = ()) -> Table:
    """Begin a table without lines, whose cells go on in the next line where they are too long.

    Args:
        headers: header of each column.
        right: headers of the columns that are aligned to the right.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for header in headers:
        table.add_column(header, overflow="fold", justify="right" if header in right else "left")
    return table
