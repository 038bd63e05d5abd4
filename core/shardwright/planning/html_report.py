"""The report of a plan as one page of HTML: style and pictures are in it, nothing is loaded.

Legend: G groups of tables (those drawn in a colour of their own, and all others as one), K shards, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from shardwright.planning.options import Floats, Ints
from shardwright.planning.plan import ranks_text
from shardwright.planning.text import bytes_text

if TYPE_CHECKING:
    from shardwright.planning.report import Report
    from shardwright.planning.statistics import Statistics

# Okabe and Ito's palette, which the colour-blind can tell apart, and its colours again in a darker tone.
_COLOURS = (
    *("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7"),
    *("#8a5f00", "#336b8b", "#005e45", "#908828", "#00446b", "#803800", "#7a4864"),
)
_OTHERS = "#9a9a9a"
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 1000, 300, 90, 36, 16

_STYLE = """
:root { color-scheme: light dark; --line: #8888; --faint: #8883; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 66rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { border-bottom: 1px solid var(--faint); padding: .2rem .6rem; text-align: left; }
th { position: sticky; top: 0; background: Canvas; }
.scroll { max-height: 32rem; overflow: auto; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: currentColor; }
.legend span { display: inline-block; margin-right: 1rem; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; }
"""


def page(report: Report, title: str) -> str:
    """The page.

    Args:
        report: of a plan.
        title: its heading.
    """
    pictures = _pictures(report)
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in report.summary),
        *pictures,
        "<h2>Ranks</h2>",
        _rank_table(report),
        f"<p>{escape(report.reserved_text)} is kept free.</p>",
        "<h2>Tables</h2>",
        _table_table(report),
        "<h2>Kernels</h2>",
        _list(report.kernel_lines),
        "<h2>Assumptions</h2>",
        _list(report.assumption_lines),
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


@frozen(eq=False)
class _Groups:
    """The tables that are drawn in a colour of their own, and the others.

    Args:
        names: of the groups; the last is that of all others: ``G``.
        of_shard: the group of each shard: ``[K]``.
        rank: the rank of each shard: ``[K]``.
        world_size: ``W``.
    """

    names: Sequence[str]
    of_shard: Ints
    rank: Ints
    world_size: int

    @classmethod
    def of(cls, statistics: Statistics, columns: Iterable[Floats]) -> _Groups:
        """Those with the largest part of any picture, each drawn from one of ``columns`` ``[K]``."""
        tables = statistics.space.options.all_tables
        part = np.zeros(len(tables))
        for column in columns:
            share = np.bincount(statistics.shard_table, weights=column, minlength=len(tables))
            part = np.maximum(part, share / max(float(share.sum()), 1e-300))
        chosen = np.argsort(-part, kind="stable")[: len(_COLOURS)]
        group = np.full(len(tables), len(chosen))
        group[chosen] = np.arange(len(chosen))
        others = len(tables) - len(chosen)
        names = [tables[table].path for table in chosen.tolist()] + ([f"{others} others"] if others else [])
        world_size = statistics.space.topology.world_size
        return cls(names, group[statistics.shard_table], statistics.shard_rank, world_size)

    def heights(self, column: Floats) -> Floats:
        """What each group has of a column on each rank: ``[G, W]``."""
        place = self.of_shard * self.world_size + self.rank
        size = len(self.names) * self.world_size
        heights: Floats = np.bincount(place, weights=column, minlength=size).astype(np.float64)
        return heights.reshape(len(self.names), self.world_size)

    def colour(self, group: int) -> str:
        """The colour of a group."""
        return _COLOURS[group] if group < len(_COLOURS) else _OTHERS


def _pictures(report: Report) -> list[str]:
    statistics, space = report.statistics, report.space
    time = space.cost_ms[statistics.shard_run]
    memory = [
        space.memory_bytes[statistics.shard_run, tier].astype(float) for tier in range(len(space.tiers))
    ]
    groups = _Groups.of(statistics, [time, *memory])
    bound = report.plan.proven.bound_ms
    drawn = ["<h2>Time per rank</h2>"]
    lines = [("lower bound", bound)] if bound > 0 else []
    drawn.append(_picture("time", groups, time, _milliseconds, lines))
    for tier, (name, column) in enumerate(zip(space.tiers, memory, strict=True)):
        if column.any():
            usable = float(space.capacity_bytes[:, tier].max())
            drawn.append(f"<h2>Memory per rank: {escape(name)}</h2>")
            drawn.append(_picture(f"memory-{name}", groups, column, bytes_text, [("may be used", usable)]))
    return [*drawn, _legend(groups)]


def _milliseconds(value: float) -> str:
    return f"{value:.4g} ms"


def _legend(groups: _Groups) -> str:
    spans = (
        f'<span><i style="background:{groups.colour(index)}"></i>{escape(name)}</span>'
        for index, name in enumerate(groups.names)
    )
    return f'<p class="legend">{"".join(spans)}</p>'


def _picture(
    name: str,
    groups: _Groups,
    column: Floats,
    text: Callable[[float], str],
    lines: Sequence[tuple[str, float]],
) -> str:
    """Bars, one for each rank, stacked by table; dashed lines across them."""
    heights = groups.heights(column)
    top = max([float(heights.sum(axis=0).max()), *(value for _, value in lines)]) or 1.0
    scale = (_HEIGHT - _TOP - _BOTTOM) / (1.05 * top)
    base = _HEIGHT - _BOTTOM
    marks = [
        f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{base - value * scale:.1f}" y2="{base - value * scale:.1f}" '
        f'stroke="var(--faint)"/><text x="{_LEFT - 6}" y="{base - value * scale + 4:.1f}" text-anchor="end">'
        f"{escape(text(value))}</text>"
        for value in np.linspace(0, top, 4).tolist()
    ]
    dashes = [
        f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{base - value * scale:.1f}" y2="{base - value * scale:.1f}" '
        f'stroke="currentColor" stroke-dasharray="6 4"/><text x="{_WIDTH - 4}" y="{base - value * scale - 4:.1f}" '
        f'text-anchor="end">{escape(label)}: {escape(text(value))}</text>'
        for label, value in lines
    ]
    bars = _bars(groups, heights, scale, text)
    body = "".join([*marks, *bars, *_rank_labels(groups.world_size), *dashes])
    return f'<svg id="{escape(name)}" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{body}</svg>'


def _bars(groups: _Groups, heights: Floats, scale: float, text: Callable[[float], str]) -> list[str]:
    step = (_WIDTH - _LEFT) / groups.world_size
    width = step * (0.8 if groups.world_size <= 64 else 1.0)
    tops = np.cumsum(heights, axis=0)
    bars = []
    for group, rank in zip(*(index.tolist() for index in np.nonzero(heights)), strict=True):
        value = float(heights[group, rank])
        y = _HEIGHT - _BOTTOM - float(tops[group, rank]) * scale
        bars.append(
            f'<rect x="{_LEFT + rank * step:.2f}" y="{y:.2f}" width="{width:.2f}" height="{value * scale:.2f}" '
            f'fill="{groups.colour(group)}"><title>rank {rank}: {escape(groups.names[group])}, '
            f"{escape(text(value))}</title></rect>"
        )
    return bars


def _rank_labels(world_size: int) -> list[str]:
    step, every = (_WIDTH - _LEFT) / world_size, max(1, world_size // 32)
    return [
        f'<text x="{_LEFT + (rank + 0.4) * step:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{rank}</text>'
        for rank in range(0, world_size, every)
    ] + [f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 4}" text-anchor="middle">rank</text>']


def _rank_table(report: Report) -> str:
    from shardwright.planning.report import rank_cells

    header = ("rank", *report.space.tiers, "time (ms)", "input (MB)", "output (MB)", "shards")
    return _html_table(header, (rank_cells(rank) for rank in report.statistics.ranks))


def _table_table(report: Report) -> str:
    header = ("table", "rows", "columns", "sharding", "compute kernel", "time (ms)", "ranks")
    rows = (
        (
            table.path,
            f"{table.num_embeddings:_}",
            str(table.embedding_dim),
            table.sharding,
            table.compute_kernel,
            f"{table.time_ms:.4g}",
            ranks_text(table.ranks),
        )
        for table in report.statistics.tables
    )
    return _html_table(header, rows)


def _html_table(header: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    heads = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>\n{lines}</tbody></table></div>'


def _list(lines: Sequence[str]) -> str:
    first, *rest = lines
    items = "".join(f"<li>{escape(line.strip())}</li>" for line in rest)
    return f"<p>{escape(first)}</p><ul>{items}</ul>"
