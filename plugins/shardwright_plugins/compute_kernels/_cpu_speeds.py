"""Speeds of kernels on this processor, as `shardwright bench kernels` measured them and left them in a file.

The file is `kernels.json` in `$XDG_CACHE_HOME/shardwright`, or `~/.cache/shardwright`, with an entry for each processor
and set of versions. Planning reads it; without an entry the built-in order holds. Ranks that plan by themselves must
agree: measure on all machines of a job or on none, or plan with ``collective_plan``.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path

_CLEARLY = 0.9  # of the other's time: below that one kernel is preferred, so that noise makes no choice
_PACKAGES = ("numba", "fbgemm-gpu-cpu")


def speeds_file() -> Path:
    """Path of the file that keeps the figures."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "shardwright" / "kernels.json"


def is_clearly_faster(kernel: str, other: str) -> bool:
    """Tell whether one kernel was measured here and takes less than nine tenths of another's time."""
    known = _known()
    return kernel in known and other in known and known[kernel] < _CLEARLY * known[other]


def keep(milliseconds: Mapping[str, float]) -> Path:
    """Write the figures of this processor beside those of others; returns the file."""
    path = speeds_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {**_read(path), _here(): dict(milliseconds)}
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(whole, indent=1, sort_keys=True))
    unfinished.replace(path)
    _known.cache_clear()
    return path


@lru_cache(maxsize=1)
def _known() -> Mapping[str, float]:
    """The figures of this processor, in milliseconds; read once."""
    own = _read(speeds_file()).get(_here())
    return own if isinstance(own, dict) else {}


def _read(path: Path) -> dict[str, dict[str, float]]:
    """All figures; none where the file is missing or damaged, as it can be measured again."""
    try:
        whole = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return whole if isinstance(whole, dict) else {}


def _here() -> str:
    """This processor and the versions that matter."""
    return ", ".join([processor(), *(f"{name} {_version(name)}" for name in _PACKAGES)])


def processor() -> str:
    """The name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"
