"""What each rank does to check the lean loop of tests/benchmarks; FBGEMM is imported where it is called."""

from __future__ import annotations

from argparse import Namespace


def check(options: Namespace) -> None:
    from tests.benchmarks import lean_loop

    lean_loop.check(lean_loop.LeanLoop(options), options)
