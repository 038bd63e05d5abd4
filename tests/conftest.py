"""What holds for all tests."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings


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
