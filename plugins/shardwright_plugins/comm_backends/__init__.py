"""The built-in comm backends. Thin: torch is imported when a process group is connected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.contracts import CommBackend, Extension
from shardwright.hookspecs import hookimpl
from shardwright_plugins.comm_backends.gloo import Gloo
from shardwright_plugins.comm_backends.nccl import Nccl


class CommBackendCheck(Extension):
    """Looks at the backends that torch was built with."""

    name = "check:comm_backends"
    help = "Backends that torch was built with."

    def load(self) -> Callable[..., Any]:
        """The function that looks."""
        from shardwright_plugins.comm_backends._checks import comm_backends

        return comm_backends


class Communicators(Extension):
    """Brings `shardwright.TorchCommunicator`, on which comm backends over torch.distributed are built."""

    name = "names:communicators"
    help = "Collectives over a process group of torch.distributed."

    def load(self) -> Callable[[str], Any]:
        """The function that gives what has a public name."""
        from shardwright_plugins.comm_backends import torch_communicator

        return torch_communicator.__dict__.__getitem__


@hookimpl
def shardwright_comm_backends() -> list[type[CommBackend]]:
    """Offer the built-in comm backends."""
    return [Gloo, Nccl]


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer the check of the backends, and what backends are built on."""
    return [CommBackendCheck, Communicators]
