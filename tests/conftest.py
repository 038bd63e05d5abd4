"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile

import pytest
from hypothesis import find, settings, strategies

SLOW_LIMIT_S = 900
"""Time-out of a test marked slow, s: many times what any takes alone on two cores, for machines that do other work."""

# As many threads as in a run of all tests, whichever modules are collected; processes that tests start have them too.
os.environ["OMP_NUM_THREADS"] = "1"

# Compiled code is kept, also where a container's variable says otherwise: else each of hundreds of processes that tests
# start compiles the library again, and each worker rewrites the assertions of all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_configure(config: pytest.Config) -> None:
    """Keep what this machine's user has measured of kernels out of plans."""
    cache = tempfile.TemporaryDirectory(prefix="shardwright-tests-")
    config.add_cleanup(cache.cleanup)
    os.environ["XDG_CACHE_HOME"] = cache.name


def pytest_collection_finish() -> None:
    """Leave all that was imported out of collections of garbage, which take half a second each otherwise."""
    # In its first example Hypothesis looks who holds its random numbers, and does not see objects that are left out.
    find(strategies.none(), lambda value: True)
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give slow tests more time."""
    for item in items:
        if item.get_closest_marker("slow") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT_S))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a device where there is none."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")


# No test asserts a time: a loaded machine must not fail one that is right.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Who runs the tests in the background of a shell has Ctrl-C ignored, here and in all processes that tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
