"""Turns of threads and streams at memory on a device."""

from __future__ import annotations

from threading import Lock

import torch

from shardwright.runtime.ranks.devices import has_streams


class Turns:
    """A lock whose holders have the device to themselves, one after the other, on whatever stream each queues its work.

    A stream waits for the work of the holder before, and for no other. The host waits for nothing but the lock.

    Args:
        device: device of the memory. What is queued on its current stream by now is the first turn.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, Lock()
        self._done = self._event()

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._done is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._done)

    def __exit__(self, *error: object) -> None:
        try:
            self._done = self._event()
        finally:
            self._lock.release()

    def _event(self) -> torch.Event | None:
        """Mark the end of the work queued on the current stream; nothing where work is done as it is called."""
        return (
            torch.accelerator.current_stream(self._device).record_event()
            if has_streams(self._device)
            else None
        )
