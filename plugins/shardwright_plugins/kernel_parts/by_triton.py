"""Parts of kernels in Triton: places of bags and results on the device, sizes of programs, launches."""

from __future__ import annotations

from shardwright.runtime.ranks.devices import sent_to
from shardwright.runtime.step.segments import starts_of
from shardwright_plugins.compute_kernels.fused_triton._geometry import Geometry, Tiles, power_of_2
from shardwright_plugins.compute_kernels.fused_triton._kernels import (
    FROM_PAYLOAD,
    launch,
    places_of,
    spans_of,
)
from shardwright_plugins.compute_kernels.fused_triton._reading import cells_of, on_device

__all__ = [
    "FROM_PAYLOAD",
    "Geometry",
    "Tiles",
    "cells_of",
    "launch",
    "on_device",
    "places_of",
    "power_of_2",
    "sent_to",
    "spans_of",
    "starts_of",
]
