"""The page: what of a report's data its pictures and tables show, in the order of the page.

Nothing is loaded: style, script and pictures are in it, and its policy lets a browser refuse all else.

Legend: A tables, G sharding types, W ranks, M memory tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from attrs import frozen

from shardwright.planning.arrays import Floats, Ints
from shardwright.planning.plan.sharding import ranks_text
from shardwright.planning.text import bytes_text, number_text
from shardwright_plugins.reports.html.charts import (
    MS,
    Chart,
    Scale,
    counted,
    doubling_edges,
    even_edges,
    histogram,
)

# Okabe and Ito's palette, which the colour-blind can tell apart, and its colours again in a darker tone.
_COLOURS = (
    *("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442"),
    *("#8a5f00", "#336b8b", "#005e45", "#908828", "#00446b", "#803800", "#7a4864"),
)
_OTHERS = "#9a9a9a"
_NUM_TOP = 20  # tables that take most time
_NUM_BINS = 24
_FEW = 8  # ranks, or tables: no histogram of less
_NUM_LABELS = 8  # of ranks below a picture

_FOLDER = Path(__file__).parent
TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_FOLDER),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.filters |= {"bytes": bytes_text, "number": number_text, "ranks": ranks_text}


def page(data: Mapping[str, Any], title: str) -> str:
    """The page of a report.

    Args:
        data: JSON data of the report, see ``Report.to_data``.
        title: its heading.
    """
    own = _Report(data)
    return TEMPLATES.get_template("page.html.j2").render(
        data=data,
        title=title,
        report=own,
        style=resource("page.css"),
        script=resource("page.js"),
        num_top=_NUM_TOP,
    )


def resource(name: str) -> str:
    """The text of a file of this folder."""
    return (_FOLDER / name).read_text(encoding="utf-8")


@frozen(eq=False, slots=False)
class _Report:
    """A report's data, as the template asks for it."""

    data: Mapping[str, Any]

    @property
    def tables(self) -> Sequence[Mapping[str, Any]]:
        """All tables: ``[A]``."""
        tables: Sequence[Mapping[str, Any]] = self.data["tables"]
        return tables

    @property
    def ranks(self) -> Sequence[Mapping[str, Any]]:
        """All ranks: ``[W]``."""
        ranks: Sequence[Mapping[str, Any]] = self.data["ranks"]
        return ranks

    @cached_property
    def time_of_types(self) -> dict[str, float]:
        """Sharding type -> the time of all shards of its tables; those that take most first: ``[G]``."""
        time: dict[str, float] = {}
        for table in self.tables:
            time[table["sharding_type"]] = time.get(table["sharding_type"], 0.0) + table["time_ms"]
        return {name: time[name] for name in sorted(time, key=lambda name: (-time[name], name))}

    @property
    def total_ms(self) -> float:
        """Time of all shards of all tables."""
        return sum(self.time_of_types.values()) or 1.0

    @cached_property
    def colours(self) -> dict[str, str]:
        """Sharding type -> its colour."""
        colours = (*_COLOURS, *[_OTHERS] * len(self.time_of_types))
        return dict(zip(self.time_of_types, colours, strict=False))

    def tables_of(self, sharding_type: str) -> list[Mapping[str, Any]]:
        """The tables of a sharding type."""
        return [table for table in self.tables if table["sharding_type"] == sharding_type]

    def facts(self) -> Iterator[tuple[str, str]]:
        """Names and texts of what readers look for first."""
        topology, time = self.data["topology"], self._of_ranks(lambda rank: rank["time_ms"])
        hosts = len(time) // topology["local_world_size"]
        devices = " and ".join(dict.fromkeys(np.atleast_1d(topology["compute_device"]).tolist()))
        yield "Tables", f"{len(self.tables):,}"
        yield "Ranks", f"{len(time):,} on {devices}{f', {hosts} hosts' if hosts > 1 else ''}"
        if "batch_size" in self.data["inputs"]:
            yield "Batch size of a rank", f"{self.data['inputs']['batch_size']['value']:,}"
        part = time.mean() / max(time.max(), 1e-300)
        yield "Slowest rank", f"rank {int(time.argmax())}; on average they take {part:.1%} of its time"
        for tier in self.tiers:
            full = self._used(tier) / np.maximum(self._usable(tier), 1)
            yield f"Fullest {tier}", f"rank {int(full.argmax())}, {full.max():.0%} of what may be used"

    @cached_property
    def tiers(self) -> list[str]:
        """The memories that shards are in."""
        return [tier for tier in self.ranks[0]["used_bytes"] if self._used(tier).any()]

    @cached_property
    def table_tiers(self) -> list[str]:
        """The memories that tables are in."""
        return [
            tier for tier in self.ranks[0]["used_bytes"] if any(t["used_bytes"][tier] for t in self.tables)
        ]

    def _of_ranks(self, value: Callable[[Mapping[str, Any]], float]) -> Floats:
        return np.array([value(rank) for rank in self.ranks], dtype=np.float64)

    def _used(self, tier: str) -> Floats:
        return self._of_ranks(lambda rank: rank["used_bytes"][tier])

    def _usable(self, tier: str) -> Floats:
        return self._of_ranks(lambda rank: rank["usable_bytes"][tier])

    def rank_charts(self) -> Iterator[Chart]:
        """Time and memory of each rank, by sharding type."""
        bound = self.data["objective"]["lower_bound_ms"]
        limits = [("lower bound", bound)] if bound > 0 else []
        yield self._rank_chart("time", "Time per rank", lambda part: part["time_ms"], MS, limits)
        for tier in self.tiers:
            usable = float(self._usable(tier).max())
            yield self._rank_chart(
                f"memory-{tier}",
                f"Memory per rank: {tier}",
                lambda part, tier=tier: part["used_bytes"][tier],  # type: ignore[misc]
                Scale.of_bytes(usable),
                [("may be used", usable)],
            )

    def _rank_chart(
        self,
        name: str,
        title: str,
        value: Callable[[Mapping[str, Any]], float],
        scale: Scale,
        limits: Sequence[tuple[str, float]],
    ) -> Chart:
        types = list(self.time_of_types)
        heights = np.array(
            [
                [value(rank["types"][kind]) if kind in rank["types"] else 0.0 for rank in self.ranks]
                for kind in types
            ],
            dtype=np.float64,
        )
        bars, colours = [f"rank {rank['rank']}" for rank in self.ranks], list(self.colours.values())
        return Chart(name, title, heights, types, colours, bars, _rank_labels(len(bars)), scale, limits)

    def histograms(self) -> Iterator[Chart]:
        """Draw how ranks spread over time and memory, and tables over size and time, where there are some."""
        if len(self.ranks) >= _FEW:
            time = self._of_ranks(lambda rank: rank["time_ms"])
            yield _histogram_of_ranks("ranks-by-time", "Ranks by time", time, MS)
            for tier in self.tiers:
                used = self._used(tier)
                scale = Scale.of_bytes(float(used.max()))
                yield _histogram_of_ranks(f"ranks-by-memory-{tier}", f"Ranks by memory: {tier}", used, scale)
        if len(self.tables) >= _FEW:
            size = np.array([sum(table["used_bytes"].values()) for table in self.tables], dtype=np.float64)
            time = np.array([table["time_ms"] for table in self.tables])
            yield self._of_tables("tables-by-memory", "Tables by memory", size, Scale.of_bytes)
            yield self._of_tables("tables-by-time", "Tables by time", time, lambda _: MS)

    def _of_tables(self, name: str, title: str, values: Floats, scale: Callable[[float], Scale]) -> Chart:
        types = list(self.time_of_types)
        group: Ints = np.array([types.index(table["sharding_type"]) for table in self.tables])
        edges = doubling_edges(values)
        counts = counted(values, edges, group, len(types))
        texts = [scale(edge).text(edge) for edge in edges.tolist()]
        return histogram(name, title, counts, types, list(self.colours.values()), texts)

    def top(self) -> list[Mapping[str, Any]]:
        """The tables that take most time, where there are many."""
        if len(self.tables) <= _NUM_TOP:
            return []
        return sorted(self.tables, key=lambda table: (-table["time_ms"], table["path"]))[:_NUM_TOP]


def _histogram_of_ranks(name: str, title: str, values: Floats, scale: Scale) -> Chart:
    edges = even_edges(values, _NUM_BINS)
    counts = counted(values, edges, np.zeros(len(values), dtype=np.int64), 1)
    return histogram(name, title, counts, ["ranks"], [_OTHERS], [scale.text(edge) for edge in edges.tolist()])


def _rank_labels(num_ranks: int) -> list[tuple[float, str]]:
    """Some ranks, the first and the last among them, and their places below the bars."""
    every = max(1, -(-(num_ranks - 1) // _NUM_LABELS))
    ranks = [rank for rank in range(0, num_ranks, every) if num_ranks - 1 - rank >= every / 2]
    return [
        ((rank + 0.5) / num_ranks, f"rank {rank}" if index == 0 else str(rank))
        for index, rank in enumerate([*ranks, num_ranks - 1])
    ]
