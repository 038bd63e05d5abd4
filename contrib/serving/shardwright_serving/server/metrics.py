"""Metrics for Prometheus, summed over the worker processes."""

from __future__ import annotations

import os
import re
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable of the client library: the folder where worker processes leave their values."""
SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class Metrics:
    """The counters of a worker."""

    def __init__(self) -> None:
        own = CollectorRegistry()
        self._registry = own
        self.requests = Counter("shardwright_requests", "Requests for predictions.", ["code"], registry=own)
        self.request_seconds = Histogram(
            "shardwright_request_seconds",
            "Time from a request's head to its answer, s.",
            registry=own,
            buckets=SECONDS,
        )
        self.batch_seconds = Histogram(
            "shardwright_batch_seconds", "Time of the program per batch, s.", registry=own, buckets=SECONDS
        )
        self.batch_samples = Histogram(
            "shardwright_batch_samples", "Samples per batch.", registry=own, buckets=SAMPLES
        )
        self.queued_samples = Gauge(
            "shardwright_queued_samples",
            "Samples that wait for their batch.",
            registry=own,
            multiprocess_mode="livesum",
        )
        self.workers = Gauge(
            "shardwright_workers",
            "Workers that serve a version of the package.",
            ["version"],
            registry=own,
            multiprocess_mode="livesum",
        )
        self.package_loads = Counter(
            "shardwright_package_loads", "Packages taken, or not.", ["result"], registry=own
        )

    def text(self) -> bytes:
        """Expose the values of all workers in Prometheus's format."""
        registry = self._registry
        if FOLDER_VARIABLE in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
        return generate_latest(registry)


def forget_dead_workers() -> None:
    """Drop the gauges of workers that are no more; what they have counted stays."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return
    names = [re.search(r"_(\d+)\.db$", path.name) for path in Path(folder).glob("gauge_live*.db")]
    for pid in {int(name[1]) for name in names if name}:
        if not _is_alive(pid):
            mark_process_dead(pid)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
