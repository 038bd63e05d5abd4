"""Pictures of layouts in text: the table as a box, its blocks inside, each with the rank it must or may be on.

`python -m tests.pictures.layouts row_wise` prints what the page on sharding types has.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from attrs import frozen

from shardwright import Block, Layout, ParameterConstraints, TableSpec, Topology
from shardwright.host.plugin_host import host
from shardwright.planning.plan.sharding import ranks_text

_WIDTH = 63  # characters between the box's edges
_MOST_BANDS = 12
_CORNERS = {
    # up, down, left, right
    (False, True, False, True): "┌",
    (False, True, True, False): "┐",
    (True, False, False, True): "└",
    (True, False, True, False): "┘",
    (True, True, False, True): "├",
    (True, True, True, False): "┤",
    (False, True, True, True): "┬",
    (True, False, True, True): "┴",
    (True, True, True, True): "┼",
    (False, False, True, True): "─",
}


def drawings(name: str, *, ranks: int = 4, hosts: int = 2, rows: int = 8, dim: int = 64) -> str:
    """The layouts that a sharding type offers for a sample table over sample ranks, as text.

    Raises:
        UnknownPluginError: no sharding type has that name.
    """
    kind = host().sharding_types.create(name)
    topology = Topology(world_size=ranks, compute_device="cpu", local_world_size=ranks // hosts)
    table = TableSpec("sample", num_embeddings=rows, embedding_dim=dim)
    supported = kind.supports(table, topology)
    if supported is not True:
        return f"{kind.name} ({kind.abbreviation}): {supported}"
    offered = list(kind.layouts(table, topology, ParameterConstraints(sharding_types=[kind.name])))
    lines = [
        f"{kind.name} ({kind.abbreviation}), {own.variant + ', ' if own.variant else ''}"
        f"dataflow {' and '.join(dataflow.name for dataflow in own.dataflows)}\n" + draw(own)
        for own in offered
    ]
    return "\n".join(lines) or f"{kind.name} ({kind.abbreviation}): no layout for this table"


@frozen
class _Band:
    """Neighbouring rows of one part, and the blocks that hold them, from left to right."""

    start: int
    stop: int
    blocks: tuple[Block, ...]


def draw(layout: Layout) -> str:
    """A layout as lines of text: rows from top to bottom, columns from left to right, rows not to scale.

    A block says where it may be: ``rank 2``; ``any rank``; ``host A, local 1``, the second rank of a host, where blocks
    with one letter share a host, whichever it is. Rows that are dealt to parts one by one are drawn as they lie in
    the table; after a dozen changes of the part the rest is left out.
    """
    bands = list(_bands(layout))
    shown = bands[:_MOST_BANDS]
    dim = max(block.columns.stop for block in layout.blocks)
    names = [f"rows {band.start}-{band.stop - 1}" for band in shown]
    margin = max(len(name) for name in names)
    edges = [_edges(band, dim) for band in shown]
    lines = [" " * margin + f" columns 0-{dim - 1}"]
    for index, band in enumerate(shown):
        above = edges[index - 1] if index else ()
        lines.append(" " * margin + " " + _border(above, edges[index]))
        lines.append(f"{names[index]:<{margin}} {_content(band, edges[index], layout)}")
    lines.append(" " * margin + " " + _border(edges[-1], ()))
    if len(bands) > len(shown):
        lines.append(" " * margin + f" and so on, to row {bands[-1].stop - 1}")
    return "\n".join(lines)


def _bands(layout: Layout) -> Iterator[_Band]:
    blocks = list(layout.distinct_blocks())
    num_rows = layout.row_map.num_rows
    part_of_row = np.empty(num_rows, dtype=np.int64)
    for part in range(layout.row_map.num_parts):
        part_of_row[layout.row_map.rows_of(part)] = part
    changes = np.flatnonzero(np.diff(part_of_row)) + 1
    for start, stop in zip([0, *changes.tolist()], [*changes.tolist(), num_rows], strict=True):
        own = [block for block in blocks if block.rows.index == part_of_row[start]]
        yield _Band(start, stop, tuple(sorted(own, key=lambda block: block.columns.start)))


def _edges(band: _Band, dim: int) -> list[int]:
    """Compute the positions of a band's vertical lines, from left to right."""
    columns = [0, *(block.columns.stop for block in band.blocks)]
    return [round(column * (_WIDTH + 1) / dim) for column in columns]


def _border(above: Sequence[int], below: Sequence[int]) -> str:
    last = _WIDTH + 1
    places = range(last + 1)
    return "".join(_CORNERS[place in above, place in below, place > 0, place < last] for place in places)


def _content(band: _Band, edges: Sequence[int], layout: Layout) -> str:
    widths = [stop - start - 1 for start, stop in pairwise(edges)]
    cells = [_fitted(_place(block, layout), width) for block, width in zip(band.blocks, widths, strict=True)]
    return "│" + "│".join(cells) + "│"


def _place(block: Block, layout: Layout) -> str:
    """Describe where a block may be."""
    if layout.dataflow_of(block).is_replicated:
        copies = [copy for copy in layout.blocks if copy.rows.index == block.rows.index]
        ranks = sorted(copy.rank for copy in copies if copy.rank is not None)
        return f"a copy on each of ranks {ranks_text(ranks)}"
    if block.rank is not None:
        return f"rank {block.rank}"
    if block.host_group is None:
        return "any rank"
    rank = "any rank" if block.local_rank is None else f"local {block.local_rank}"
    return f"host {_letter(block.host_group)}, {rank}"


def _letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else str(number)


def _fitted(text: str, width: int) -> str:
    return text.center(width) if len(text) <= width else text[: width - 1] + "…"


if __name__ == "__main__":
    print("\n\n".join(drawings(name) for name in sys.argv[1:]))
