"""Tables whose rows are in a key-value store (LMDB), behind a cache of the rows in use.

The compute kernel ``lmdb_caching`` trains them. :func:`commit` keeps them in place, at the cost of the rows that
changed, and :func:`restore` goes back to that, in another process too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import shardwright as sw
from shardwright_store.kernel import FOLDER_VARIABLE, LmdbCaching

if TYPE_CHECKING:
    from shardwright_store.commits import commit, restore

__all__ = ["FOLDER_VARIABLE", "LmdbCaching", "commit", "restore"]

api = 1


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shardwright_store import commits  # imports torch, which planning does without

    return getattr(commits, name)


@sw.hookimpl
def shardwright_compute_kernels() -> Sequence[type[sw.ComputeKernel]]:
    """Offer the kernel."""
    return [LmdbCaching]
