"""The built-in comm backends. Thin: torch is imported when a process group is connected."""

from __future__ import annotations

from shardwright.contracts import CommBackend, Extension
from shardwright.hookspecs import hookimpl
from shardwright_plugins.comm_backends.gloo import Gloo
from shardwright_plugins.comm_backends.nccl import Nccl
from shardwright_plugins.imported import imported, names_of


@hookimpl
def shardwright_comm_backends() -> list[type[CommBackend]]:
    """Offer the built-in comm backends."""
    return [Gloo, Nccl]


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer the check of the backends, and what backends are built on."""
    return [
        imported(
            "check:comm_backends",
            "shardwright_plugins.comm_backends._checks:comm_backends",
            "Backends that torch was built with.",
        ),
        names_of(
            "names:communicators",
            ("shardwright_plugins.comm_backends.torch_communicator",),
            "Collectives over a process group of torch.distributed.",
        ),
    ]
