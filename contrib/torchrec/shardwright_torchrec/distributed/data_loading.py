"""A thread that reads batches ahead and copies them to the device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import torch

import shardwright as sw

__all__ = ["DataLoadingThread"]

_POLL_S = 0.1
"""Seconds between looks at whether the thread is to stop, while nobody takes its batch."""


class DataLoadingThread(threading.Thread):
    """Reads one batch ahead.

    Args:
        device: device of the batches.
        dataloader_iter: the batches.
        to_device_non_blocking: copy without waiting for the copy.
        memcpy_stream_priority: not needed.
        memcpy_stream: stream of the copies; the current one by default.
    """

    def __init__(
        self,
        device: torch.device,
        dataloader_iter: Iterator[Any],
        to_device_non_blocking: bool,
        memcpy_stream_priority: int = 0,
        memcpy_stream: Any = None,
    ) -> None:
        super().__init__(daemon=True, name="DataLoadingThread")
        self._device, self._batches = device, dataloader_iter
        self._non_blocking, self._stream = to_device_non_blocking, memcpy_stream
        self._read: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(maxsize=1)
        self._is_stopped = threading.Event()

    def run(self) -> None:
        """Read until the batches end, one of them fails or `stop` is called."""
        while not self._is_stopped.is_set():
            try:
                batch, error = self._copied(next(self._batches)), None
            except BaseException as failure:  # raised where the batch is asked for
                batch, error = None, failure
            self._hand_over(batch, error)
            if error is not None:
                return

    def _copied(self, batch: Any) -> Any:
        if not hasattr(batch, "to"):
            return batch
        if self._stream is None:
            return batch.to(self._device, non_blocking=self._non_blocking)
        with torch.cuda.stream(self._stream):
            return batch.to(self._device, non_blocking=self._non_blocking)

    def _hand_over(self, batch: Any, error: BaseException | None) -> None:
        while not self._is_stopped.is_set():
            try:
                self._read.put((batch, error), timeout=_POLL_S)
            except queue.Full:
                continue
            return

    def stop(self) -> None:
        """Stop reading, and wait for the batch that is being read."""
        self._is_stopped.set()
        self.join()

    def get_next_batch(self, none_throws: bool = False) -> Any:
        """The next batch; `None` at the end.

        Args:
            none_throws: raise at the end instead.

        Raises:
            StopIteration: there are no more, and `none_throws`.
            InvalidInputError: the thread was not started, or was stopped.
        """
        while True:
            try:
                batch, error = self._read.get(timeout=_POLL_S)
                break
            except queue.Empty:
                if not self.is_alive() and self._read.empty():
                    raise sw.InvalidInputError(
                        "the thread reads nothing: it was not started, or was stopped"
                    ) from None
        if isinstance(error, StopIteration):
            self._read.put((None, error))  # it stays at its end
            if none_throws:
                raise error
            return None
        if error is not None:
            raise error
        return batch
