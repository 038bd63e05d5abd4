"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# No test asserts a time: a loaded machine must not fail one that is right.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
