"""Bar charts as numbers for the template: a chart's bars stretch with the page, and its texts keep their size.

Legend: G groups, each of a colour, N bars.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from attrs import frozen

from shardwright.planning.arrays import Floats, Ints
from shardwright.planning.text import number_text

HEIGHT = 100.0
"""Height of a plot, in its own units; its width is N."""
HEADROOM = 1.06
"""Part of the highest value that a plot shows."""
_NUM_TICKS = 4
_MOST_WITH_GAPS = 64  # bars; more of them touch each other


@frozen
class Scale:
    """Format of the heights of a chart.

    Args:
        unit: number that heights are divided by.
        name: name of the unit.
        is_whole: heights are whole numbers.
    """

    unit: float
    name: str
    is_whole: bool = False

    @classmethod
    def of_bytes(cls, most: float) -> Scale:
        """The largest unit that is not above ``most``."""
        power = min(4, max(0, int(math.log(max(most, 1.0), 1024))))
        return cls(1024.0**power, ("B", "KiB", "MiB", "GiB", "TiB")[power])

    def text(self, value: float) -> str:
        """``27.2 GiB``."""
        return f"{number_text(value / self.unit)} {self.name}".rstrip()

    def ticks(self, top: float) -> list[float]:
        """Some round heights from 0 to ``top``."""
        least = max(top / self.unit / _NUM_TICKS, 1.0 if self.is_whole else 1e-300)
        power = 10.0 ** math.floor(math.log10(least))
        nice = (1, 2, 5, 10) if self.is_whole else (1, 2, 2.5, 5, 10)
        step = next(each * power for each in nice if each * power >= least * (1 - 1e-9)) * self.unit
        return [index * step for index in range(int(top / step) + 1)]


MS = Scale(1.0, "ms")
COUNT = Scale(1.0, "", is_whole=True)
"""Scale of numbers of things."""


@frozen(eq=False)
class Chart:
    """Bars that are stacked by group.

    Args:
        name: the id of the figure.
        title: text above it.
        heights: height of each group in each bar: ``[G, N]``.
        groups: name of each group: ``[G]``.
        colours: colour of each group: ``[G]``.
        bars: name of each bar, for the text shown when it is pointed at: ``[N]``.
        labels: places of bars, as parts of the width, with their names.
        scale: format of the heights.
        limits: names and heights of dashed lines.
    """

    name: str
    title: str
    heights: Floats
    groups: Sequence[str]
    colours: Sequence[str]
    bars: Sequence[str]
    labels: Sequence[tuple[float, str]]
    scale: Scale
    limits: Sequence[tuple[str, float]] = ()

    @property
    def top(self) -> float:
        """The height that the plot shows."""
        highest = max(float(self.heights.sum(axis=0).max(initial=0.0)), *(h for _, h in self.limits), 0.0)
        return HEADROOM * highest or 1.0

    def y(self, height: float) -> float:
        """Place of a height, from the top of the plot."""
        return HEIGHT * (1 - height / self.top)

    def paths(self) -> Iterator[tuple[str, str]]:
        """Colours, and SVG paths of one rectangle for each bar."""
        tops, gap = np.cumsum(self.heights, axis=0), 0.1 if len(self.bars) <= _MOST_WITH_GAPS else 0.0
        for colour, heights, ends in zip(self.colours, self.heights, tops, strict=True):
            drawn = (
                f"M{bar + gap:g} {self.y(ends[bar]):.3f}h{1 - 2 * gap:g}v{HEIGHT * heights[bar] / self.top:.3f}"
                f"h-{1 - 2 * gap:g}z"
                for bar in np.flatnonzero(heights).tolist()
            )
            yield colour, "".join(drawn)

    def notes(self) -> Iterator[str]:
        """``rank 3: 217.4 ms (row_wise 200 ms, table_wise 17.4 ms)``, for each bar."""
        for name, heights in zip(self.bars, self.heights.T.tolist(), strict=True):
            pairs = zip(self.groups, heights, strict=True)
            parts = [f"{group} {self.scale.text(height)}" for group, height in pairs if height > 0]
            told = f" ({', '.join(parts)})" if len(parts) > 1 else ""
            yield f"{name}: {self.scale.text(sum(heights))}{told}"


def even_edges(values: Floats, num_bins: int) -> Floats:
    """Edges of bins of equal width, over all values: ``[num_bins + 1]``."""
    low, high = float(values.min()), float(values.max())
    return np.linspace(low, high if high > low else low + (abs(low) or 1.0), num_bins + 1)


def doubling_edges(values: Floats) -> Floats:
    """Edges that are powers of two; what is below the first is in the first bin."""
    positive = values[values > 0]
    low = math.floor(math.log2(float(positive.min()))) if len(positive) else 0
    high = math.floor(math.log2(float(positive.max()))) + 1 if len(positive) else 1
    edges: Floats = np.exp2(np.arange(low, high + 1, dtype=np.float64))
    return edges


def counted(values: Floats, edges: Floats, group: Ints, num_groups: int) -> Floats:
    """Count the values of each group in each bin: ``[G, N]``; the last bin has its upper edge."""
    num_bins = len(edges) - 1
    place = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, num_bins - 1)
    flat = np.bincount(group * num_bins + place, minlength=num_groups * num_bins)
    counts: Floats = flat.astype(np.float64).reshape(num_groups, num_bins)
    return counts


def histogram(
    name: str, title: str, counts: Floats, groups: Sequence[str], colours: Sequence[str], edges: Sequence[str]
) -> Chart:
    """A histogram, whose ends and middle are labelled.

    Args:
        name: the id of the figure.
        title: text above it.
        counts: see :func:`counted`: ``[G, N]``.
        groups: name of each group: ``[G]``.
        colours: colour of each group: ``[G]``.
        edges: texts of the edges of the bins: ``[N + 1]``.
    """
    num_bins = len(edges) - 1
    shown = {0, num_bins // 2, num_bins} if num_bins > 2 else {0, num_bins}
    labels = [(place / num_bins, edges[place]) for place in sorted(shown)]
    bars = [f"{low} to {high}" for low, high in pairwise(edges)]
    return Chart(name, title, counts, groups, colours, bars, labels, COUNT)
