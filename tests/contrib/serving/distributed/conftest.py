"""The pool of ranks of the distributed tests."""

from __future__ import annotations

from tests.distributed.conftest import pool

__all__ = ["pool"]
