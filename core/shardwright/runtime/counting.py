"""Counting the collectives that a piece of work makes."""

from __future__ import annotations

from typing import Any

from torch.profiler import ProfilerActivity, profile

from shardwright.runtime.comm import EXCHANGE_EVENT


class CollectiveCounter:
    """Counts, in a profile, the operators of torch.distributed, and all-to-alls that are made without it.

    Attributes:
        count: how many were started, once the context is left.
    """

    def __init__(self) -> None:
        self.count = 0
        self._profile = profile(activities=[ProfilerActivity.CPU])

    def __enter__(self) -> CollectiveCounter:
        """Begin to count."""
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Count no more."""
        self._profile.__exit__(*error)
        self.count = sum(
            event.count
            for event in self._profile.key_averages()
            if event.key.startswith(("c10d::", EXCHANGE_EVENT))
        )
