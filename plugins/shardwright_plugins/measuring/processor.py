"""The name of this machine's processor, beside what was measured on it."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path


@cache
def processor() -> str:
    """Name this machine's processor, as Linux does, or else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    pairs = [
        (key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in reversed(lines))
    ]
    return _named(dict(pairs)) or platform.processor() or platform.machine()  # of the first processor


def _named(told: Mapping[str, str]) -> str:
    """Name a processor, with its family and model where a virtual machine hides its number: ``AMD EPYC``."""
    name = told.get("model name", "")
    if not name or any(own.isdigit() for own in name):
        return name
    return f"{name} (family {told.get('cpu family', '?')}, model {told.get('model', '?')})"
