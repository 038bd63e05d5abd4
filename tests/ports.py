"""Ports for processes that tests start."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

# Below 32 768, where Linux begins with the ports that it gives to who asks for any, or connects.
_PORTS = range(12_000, 32_000)


def own_port() -> int:
    """A free port of localhost that the system gives to no other process before it is used."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with suppress(OSError), socket.create_server(("localhost", port)):
            return port
