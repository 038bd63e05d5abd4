"""The built-in comm backends. Thin: torch is imported when a process group is connected."""

from __future__ import annotations

from shardwright.contracts import CommBackend
from shardwright.hookspecs import hookimpl
from shardwright_plugins.comm_backends.gloo import Gloo
from shardwright_plugins.comm_backends.nccl import Nccl


@hookimpl
def shardwright_comm_backends() -> list[type[CommBackend]]:
    """Offer the built-in comm backends."""
    return [Gloo, Nccl]
