"""The distinctions that the runtime makes between devices."""

from __future__ import annotations

import torch


def is_host(device: torch.device) -> bool:
    """Tell whether tensors of a device are in the host's memory and made by the host.

    NumPy then reads and writes them where they are, work on them is done when a call returns, and waiting for it with
    a limit blocks nobody else. Other devices have streams, and copies from and to page-locked memory.
    """
    return device.type == "cpu"


def has_accelerator(device_type: str) -> bool:
    """Tell whether this machine has an accelerator of a type, such as ``"cuda"``."""
    if not torch.accelerator.is_available():
        return False
    found = torch.accelerator.current_accelerator()
    return found is not None and found.type == device_type
