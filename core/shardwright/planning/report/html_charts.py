"""Bar charts as HTML and SVG: bars stretch with the page, and text keeps its size.

Legend: G groups, each of a colour, N bars.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np
from attrs import frozen

from shardwright.planning.arrays import Floats
from shardwright.planning.text import number_text

_HEIGHT = 100.0  # of a plot, in its own units; its width is N
_HEADROOM = 1.06
_NUM_TICKS = 4


@frozen(eq=False)
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


COUNT = Scale(1.0, "", is_whole=True)
"""Of things that are counted."""


@frozen(eq=False)
class Chart:
    """Bars that are stacked by group.

    Args:
        name: the id of the figure.
        title: above it.
        heights: height of each group in each bar: ``[G, N]``.
        colours: colour of each group: ``[G]``.
        notes: text shown for a bar that is pointed at: ``[N]``.
        labels: places of bars, as parts of the width, with their names.
        scale: format of the heights.
        limits: names and heights of dashed lines.
    """

    name: str
    title: str
    heights: Floats
    colours: Sequence[str]
    notes: Sequence[str]
    labels: Sequence[tuple[float, str]]
    scale: Scale
    limits: Sequence[tuple[str, float]] = ()

    def html(self) -> str:
        """The figure."""
        width = self.heights.shape[1]
        inside = "".join([*self._grid(), *self._bars(), *self._tips(), *self._limit_lines()])
        texts = "".join([*self._tick_names(), *self._limit_names()])
        labels = "".join(
            f'<span style="left:{100 * place:.2f}%">{escape(text)}</span>' for place, text in self.labels
        )
        return (
            f'<figure id="{escape(self.name)}"><figcaption>{escape(self.title)}</figcaption><div class="plot">'
            f'<svg viewBox="0 0 {width} {_HEIGHT:g}" preserveAspectRatio="none" role="img" '
            f'aria-label="{escape(self.title)}">{inside}</svg>{texts}</div><div class="x">{labels}</div></figure>\n'
        )

    @property
    def top(self) -> float:
        """The height that the plot shows."""
        highest = max(
            [float(self.heights.sum(axis=0).max(initial=0.0)), *(height for _, height in self.limits)]
        )
        return _HEADROOM * highest or 1.0

    def _y(self, height: float) -> float:
        return _HEIGHT * (1 - height / self.top)

    def _grid(self) -> list[str]:
        return [_line(self.heights.shape[1], self._y(tick)) for tick in self.scale.ticks(self.top)]

    def _limit_lines(self) -> list[str]:
        return [_line(self.heights.shape[1], self._y(height), ' class="limit"') for _, height in self.limits]

    def _tick_names(self) -> list[str]:
        return [
            f'<span class="tick" style="bottom:{100 * tick / self.top:.2f}%">{escape(self.scale.text(tick))}</span>'
            for tick in self.scale.ticks(self.top)
        ]

    def _limit_names(self) -> list[str]:
        return [
            f'<span class="limit-name" style="bottom:calc({100 * height / self.top:.2f}% + 2px)">'
            f"{escape(name)}: {escape(self.scale.text(height))}</span>"
            for name, height in self.limits
        ]

    def _bars(self) -> list[str]:
        """A path for each group: a rectangle for each bar."""
        tops = np.cumsum(self.heights, axis=0)
        gap = 0.1 if self.heights.shape[1] <= 64 else 0.0
        paths = []
        for group, colour in enumerate(self.colours):
            bars = np.flatnonzero(self.heights[group]).tolist()
            drawn = "".join(
                f"M{bar + gap:g} {self._y(float(tops[group, bar])):.3f}h{1 - 2 * gap:g}"
                f"v{_HEIGHT * float(self.heights[group, bar]) / self.top:.3f}h-{1 - 2 * gap:g}z"
                for bar in bars
            )
            if drawn:
                paths.append(f'<path fill="{colour}" d="{drawn}"/>')
        return paths

    def _tips(self) -> list[str]:
        return [
            f'<rect x="{bar}" y="0" width="1" height="{_HEIGHT:g}"><title>{escape(note)}</title></rect>'
            for bar, note in enumerate(self.notes)
        ]


def _line(width: int, y: float, kind: str = "") -> str:
    return f'<line{kind} x1="0" x2="{width}" y1="{y:.3f}" y2="{y:.3f}"/>'


@frozen(eq=False)
class Bins:
    """A histogram's.

    Args:
        edges: edges of the bins: ``[N + 1]``.
        place: the bin of each value.
    """

    edges: Floats
    place: Floats

    @classmethod
    def even(cls, values: Floats, num_bins: int) -> Bins:
        """Make bins of equal width, over all values."""
        low, high = float(values.min()), float(values.max())
        edges = np.linspace(low, high if high > low else low + (abs(low) or 1.0), num_bins + 1)
        return cls(edges, _places(values, edges))

    @classmethod
    def doubling(cls, values: Floats) -> Bins:
        """Each twice as wide as the one before it; what is below the least power of two above 0 is in the first."""
        positive = values[values > 0]
        low = math.floor(math.log2(float(positive.min()))) if len(positive) else 0
        high = math.floor(math.log2(float(positive.max()))) + 1 if len(positive) else 1
        edges: Floats = np.exp2(np.arange(low, high + 1, dtype=np.float64))
        return cls(edges, _places(values, edges))

    def counts(self, group: Floats, num_groups: int) -> Floats:
        """Count the values of each group in each bin: ``[G, N]``."""
        num_bins = len(self.edges) - 1
        flat = np.bincount((group * num_bins + self.place).astype(np.int64), minlength=num_groups * num_bins)
        counted: Floats = flat.astype(np.float64).reshape(num_groups, num_bins)
        return counted


def _places(values: Floats, edges: Floats) -> Floats:
    places: Floats = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
    return places
