"""Values that training loops move to devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch


class Multistreamable(ABC):
    """A value that is used on other streams than the one it was made on."""

    @abstractmethod
    def record_stream(self, stream: Any) -> None:
        """Keep the memory until the stream is done with it."""


class Pipelineable(Multistreamable):
    """A value that a training loop copies to its device while another batch computes."""

    @abstractmethod
    def to(self, device: torch.device, non_blocking: bool = False) -> Pipelineable:
        """The value on a device."""
