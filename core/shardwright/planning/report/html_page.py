"""The report of a plan as one page of HTML: style, script and pictures are in it, nothing is loaded.

Legend: A tables, G sharding types, K shards, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from html import escape
from importlib import resources
from itertools import pairwise

import numpy as np
from attrs import frozen

from shardwright.planning.arrays import Floats, Ints
from shardwright.planning.plan.sharding import codecs_text
from shardwright.planning.report.html_charts import COUNT, Bins, Chart, Scale
from shardwright.planning.report.html_tables import Cell, bar, dot, short_table, table
from shardwright.planning.report.report import Report
from shardwright.planning.report.statistics import RankStatistics, TableStatistics, rank_cells
from shardwright.planning.text import bytes_text, number_text

# Okabe and Ito's palette, which the colour-blind can tell apart, and its colours again in a darker tone.
_COLOURS = (
    *("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442"),
    *("#8a5f00", "#336b8b", "#005e45", "#908828", "#00446b", "#803800", "#7a4864"),
)
_OTHERS = "#9a9a9a"
_NUM_TOP = 20
_NUM_BINS = 24
_FEW = 8  # ranks, or tables: no histogram of less


def page(report: Report, title: str = "Sharding plan") -> str:
    """The page.

    Args:
        report: report of a plan.
        title: its heading.
    """
    made = _ReportPage(report)
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="headline">{escape(report.headline)}</p>',
        made.facts(),
        *(f"<p>{escape(line)}</p>" for line in report.summary[1:]),
        made.legend(),
        *(chart.html() for chart in made.rank_charts()),
        f"<p>{escape(report.reserved_text)} is kept free.</p>",
        "<h2>How ranks and tables are spread</h2>",
        f'<div class="few">{"".join(chart.html() for chart in made.histograms())}</div>',
        *made.top_tables(),
        "<h2>Ranks</h2>",
        made.all_ranks(),
        "<h2>Tables</h2>",
        made.all_tables(),
        "<h2>Kernels</h2>",
        _list(report.kernel_lines),
        "<h2>Assumptions</h2>",
        _list(report.assumption_lines),
    ]
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en">{_head(title)}\n<body>\n{body}\n{_script()}</body></html>\n'


def _head(title: str) -> str:
    # The policy lets a browser refuse whatever the page would load: there is nothing.
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return (
        f'<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{escape(title)}</title><style>\n{_resource('report.css')}</style></head>"
    )


def _script() -> str:
    return f"<script>\n{_resource('report.js')}</script>\n"


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


@frozen(eq=False, slots=False)
class _ReportPage:
    """The parts of a page."""

    report: Report

    @cached_property
    def tables(self) -> Sequence[TableStatistics]:
        """All tables: ``[A]``."""
        return self.report.statistics.tables

    @cached_property
    def time_of_kinds(self) -> dict[str, float]:
        """Sharding type -> the time of all shards of its tables; those that take most first: ``[G]``."""
        time: dict[str, float] = {}
        for own in self.tables:
            time[own.sharding_type] = time.get(own.sharding_type, 0.0) + own.time_ms
        return {name: time[name] for name in sorted(time, key=lambda name: (-time[name], name))}

    @cached_property
    def colours(self) -> dict[str, str]:
        """Sharding type -> its colour."""
        return {
            kind: _COLOURS[place] if place < len(_COLOURS) else _OTHERS
            for place, kind in enumerate(self.time_of_kinds)
        }

    @cached_property
    def kind_of_table(self) -> Ints:
        """The place of each table's type among the types: ``[A]``."""
        place = {kind: index for index, kind in enumerate(self.time_of_kinds)}
        return np.array([place[own.sharding_type] for own in self.tables], dtype=np.int64)

    def facts(self) -> str:
        """Render the facts that readers look for first."""
        items = "".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in self._facts()
        )
        return f'<dl class="facts">{items}</dl>'

    def _facts(self) -> Iterator[tuple[str, str]]:
        report, statistics = self.report, self.report.statistics
        topology, time = report.space.topology, statistics.time_ms
        hosts = f", {topology.num_hosts} hosts" if topology.num_hosts > 1 else ""
        yield "Tables", f"{len(self.tables):,}"
        yield "Ranks", f"{topology.world_size:,} on {' and '.join(topology.device_types)}{hosts}"
        if "batch_size" in report.inputs:
            yield "Batch size of a rank", f"{report.inputs['batch_size']['value']:,}"
        part = time.mean() / max(time.max(), 1e-300)
        yield "Slowest rank", f"rank {int(time.argmax())}; on average they take {part:.1%} of its time"
        for tier, name in enumerate(report.space.tiers):
            usable, used = report.space.capacity_bytes[:, tier], statistics.used_bytes[:, tier]
            if used.any():
                full = used / np.maximum(usable, 1)
                yield f"Fullest {name}", f"rank {int(full.argmax())}, {full.max():.0%} of what may be used"

    def legend(self) -> str:
        """The sharding types with their colours, how many tables they have, and what part of the time they take."""
        total = sum(self.time_of_kinds.values()) or 1.0
        counts = np.bincount(self.kind_of_table, minlength=len(self.time_of_kinds)).tolist()
        short = {own.sharding_type: own.abbreviation for own in self.tables}
        spans = "".join(
            f"<span>{dot(self.colours[kind])}{escape(kind)} ({escape(short[kind])}) "
            f"<small>{count:,} table{'s' if count > 1 else ''}, {time / total:.0%} of the time</small></span>"
            for (kind, time), count in zip(self.time_of_kinds.items(), counts, strict=True)
        )
        return f'<div class="legend">{spans}</div>'

    def rank_charts(self) -> Iterator[Chart]:
        """Time and memory of each rank, by sharding type."""
        report, statistics = self.report, self.report.statistics
        run, bound = statistics.shard_run, report.plan.proven.bound_ms
        limits = [("lower bound", bound)] if bound > 0 else []
        yield self._rank_chart("time", "Time per rank", report.space.cost_ms[run], Scale(1.0, "ms"), limits)
        for tier, name in enumerate(report.space.tiers):
            column = report.space.memory_bytes[run, tier].astype(np.float64)
            if column.any():
                usable = float(report.space.capacity_bytes[:, tier].max())
                scale, limit = Scale.of_bytes(usable), [("may be used", usable)]
                yield self._rank_chart(f"memory-{name}", f"Memory per rank: {name}", column, scale, limit)

    def _rank_chart(
        self, name: str, title: str, column: Floats, scale: Scale, limits: Sequence[tuple[str, float]]
    ) -> Chart:
        statistics = self.report.statistics
        num_ranks, kinds = self.report.space.topology.world_size, list(self.time_of_kinds)
        group = self.kind_of_table[statistics.shard_table]
        flat = np.bincount(
            group * num_ranks + statistics.shard_rank, weights=column, minlength=len(kinds) * num_ranks
        )
        heights = flat.astype(np.float64).reshape(len(kinds), num_ranks)
        notes = [_note(f"rank {rank}", kinds, heights[:, rank], scale) for rank in range(num_ranks)]
        colours = list(self.colours.values())
        return Chart(name, title, heights, colours, notes, _rank_labels(num_ranks), scale, limits)

    def histograms(self) -> Iterator[Chart]:
        """Draw how ranks spread over time and memory, and tables over size and time, where there are some."""
        report, statistics = self.report, self.report.statistics
        if report.space.topology.world_size >= _FEW:
            yield self._of_ranks("ranks-by-time", "Ranks by time", statistics.time_ms, Scale(1.0, "ms"))
            for tier, name in enumerate(report.space.tiers):
                used = statistics.used_bytes[:, tier].astype(np.float64)
                if used.any():
                    scale = Scale.of_bytes(float(used.max()))
                    yield self._of_ranks(f"ranks-by-memory-{name}", f"Ranks by memory: {name}", used, scale)
        if len(self.tables) >= _FEW:
            size = np.array([sum(own.used_bytes.values()) for own in self.tables], dtype=np.float64)
            time = np.array([own.time_ms for own in self.tables])
            yield self._of_tables("tables-by-memory", "Tables by memory", size, Scale.of_bytes)
            yield self._of_tables("tables-by-time", "Tables by time", time, lambda _: Scale(1.0, "ms"))

    def _of_ranks(self, name: str, title: str, values: Floats, scale: Scale) -> Chart:
        bins = Bins.even(values, _NUM_BINS)
        counts = bins.counts(np.zeros(len(values)), 1)
        edges = [scale.text(edge) for edge in bins.edges.tolist()]
        return _histogram(name, title, counts, ["ranks"], [_OTHERS], edges)

    def _of_tables(self, name: str, title: str, values: Floats, scale: Callable[[float], Scale]) -> Chart:
        bins = Bins.doubling(values)
        counts = bins.counts(self.kind_of_table.astype(np.float64), len(self.time_of_kinds))
        edges = [scale(edge).text(edge) for edge in bins.edges.tolist()]
        return _histogram(name, title, counts, list(self.time_of_kinds), list(self.colours.values()), edges)

    def top_tables(self) -> Iterator[str]:
        """Render the tables that take most time, where there are many."""
        if len(self.tables) <= _NUM_TOP:
            return
        top = sorted(self.tables, key=lambda own: (-own.time_ms, own.path))[:_NUM_TOP]
        most, total = top[0].time_ms or 1.0, sum(self.time_of_kinds.values()) or 1.0
        rows = [
            (
                Cell(own.path),
                Cell(number_text(own.time_ms), own.time_ms),
                Cell(f"{own.time_ms / total:.1%}", own.time_ms),
                Cell("", after=bar(own.time_ms / most, self.colours[own.sharding_type])),
                self._sharding(own),
                *self._sizes(own),
                Cell(own.ranks_text, is_long=True),
            )
            for own in top
        ]
        header = ("table", "time (ms)", "of all", "", "sharding", *self._tiers, "ranks")
        yield f"<h2>The {_NUM_TOP} tables that take most time</h2>\n{short_table('top', header, rows)}"

    def all_ranks(self) -> str:
        """Render the table of ranks: their memory, time and traffic."""
        header = ("rank", *self.report.space.tiers, "time (ms)", "input (MB)", "output (MB)", "shards")
        return table("ranks", header, map(_rank_row, self.report.statistics.ranks))

    def all_tables(self) -> str:
        """Render the table of tables: the sharding and cost of each."""
        codecs = any(own.qcomms_config for own in self.tables)
        header = ("table", "rows", "columns", "sharding", "kernel", "time (ms)", *self._tiers, "ranks")
        rows = (
            (
                Cell(own.path),
                Cell(f"{own.num_embeddings:,}", own.num_embeddings),
                Cell(str(own.embedding_dim), own.embedding_dim),
                self._sharding(own),
                Cell(own.compute_kernel),
                Cell(number_text(own.time_ms), own.time_ms),
                *self._sizes(own),
                Cell(own.ranks_text, is_long=True),
                *([Cell(codecs_text(own.qcomms_config))] if codecs else []),
            )
            for own in self.tables
        )
        return table("tables", (*header, "codecs of results / gradients") if codecs else header, rows)

    @cached_property
    def _tiers(self) -> tuple[str, ...]:
        """The memories that tables are in."""
        return tuple(
            name for name in self.report.space.tiers if any(own.used_bytes[name] for own in self.tables)
        )

    def _sizes(self, own: TableStatistics) -> list[Cell]:
        return [Cell(bytes_text(own.used_bytes[name]), own.used_bytes[name]) for name in self._tiers]

    def _sharding(self, own: TableStatistics) -> Cell:
        variant = f" ({own.variant})" if own.variant else ""
        return Cell(f"{own.sharding_type}{variant}", before=dot(self.colours[own.sharding_type]))


def _rank_row(rank: RankStatistics) -> list[Cell]:
    values = (rank.rank, *rank.used_bytes.values(), rank.time_ms, rank.input_bytes, rank.output_bytes)
    *texts, shards = rank_cells(rank)
    return [
        *(Cell(text, value) for text, value in zip(texts, values, strict=True)),
        Cell(shards, is_long=True),
    ]


def _note(what: str, kinds: Sequence[str], heights: Floats, scale: Scale) -> str:
    """``rank 3: 217.4 ms (row_wise 200 ms, table_wise 17.4 ms)``."""
    parts = [
        f"{kind} {scale.text(height)}"
        for kind, height in zip(kinds, heights.tolist(), strict=True)
        if height > 0
    ]
    return f"{what}: {scale.text(float(heights.sum()))}" + (
        f" ({', '.join(parts)})" if len(parts) > 1 else ""
    )


def _rank_labels(num_ranks: int) -> list[tuple[float, str]]:
    """Some ranks, the first and the last among them, and their places below the bars."""
    every = max(1, -(-(num_ranks - 1) // 8))
    ranks = [rank for rank in range(0, num_ranks, every) if num_ranks - 1 - rank >= every / 2]
    return [
        ((rank + 0.5) / num_ranks, f"rank {rank}" if index == 0 else str(rank))
        for index, rank in enumerate([*ranks, num_ranks - 1])
    ]


def _histogram(
    name: str,
    title: str,
    counts: Floats,
    kinds: Sequence[str],
    colours: Sequence[str],
    edges: Sequence[str],
) -> Chart:
    """A histogram, whose ends and middle are labelled."""
    scale, num_bins = COUNT, counts.shape[1]
    notes = [
        _note(f"{low} to {high}", kinds, counts[:, place], scale)
        for place, (low, high) in enumerate(pairwise(edges))
    ]
    middle = num_bins // 2
    labels = [(0.0, edges[0]), (middle / num_bins, edges[middle]), (1.0, edges[-1])]
    return Chart(name, title, counts, colours, notes, labels if num_bins > 2 else labels[::2], scale)


def _list(lines: Sequence[str]) -> str:
    first, *rest = lines
    items = "".join(f"<li>{escape(line.strip())}</li>" for line in rest)
    return f"<p>{escape(first)}</p><ul>{items}</ul>"
