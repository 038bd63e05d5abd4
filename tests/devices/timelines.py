"""Idle gaps of a device, from the times at which its work began and ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Span = tuple[float, float]


def gaps(spans: Iterable[Span], *, longer_than: float) -> list[Span]:
    """Find the stretches in which nothing ran.

    Args:
        spans: begin and end of each piece of work, on any stream.
        longer_than: shorter gaps are left out.
    """
    found: list[Span] = []
    reached: float | None = None
    for start, stop in sorted(spans):
        if reached is not None and start - reached > longer_than:
            found.append((reached, start))
        reached = stop if reached is None else max(reached, stop)
    return found


def device_spans(events: Sequence[Any]) -> list[Span]:
    """Begin and end, us, of what ran on a CUDA device in a profile."""
    import torch

    return [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
