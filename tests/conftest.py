"""What holds for all tests."""

from __future__ import annotations

import signal

from hypothesis import settings

# No test asserts a time: a loaded machine must not fail one that is right.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Who runs the tests in the background of a shell has Ctrl-C ignored, here and in all processes that tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
