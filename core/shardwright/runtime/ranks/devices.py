"""The distinctions that the runtime makes between devices."""

from __future__ import annotations

import os
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwright.errors import UnsupportedError

Array: TypeAlias = npt.NDArray[Any]


def is_host(device: torch.device) -> bool:
    """Tell whether tensors of a device are in the host's memory and made by the host.

    NumPy then reads and writes them where they are, work on them is done when a call returns, and waiting for it with
    a limit blocks nobody else.
    """
    return device.type == "cpu"


def has_streams(device: torch.device) -> bool:
    """Tell whether work on a device is queued on streams, beside copies from and to page-locked memory.

    Of others, and of a device whose module in torch has no ``Stream``, work is done in the order of the calls.
    """
    return not is_host(device) and hasattr(getattr(torch, device.type, None), "Stream")


def sent_to(device: torch.device, values: Tensor | Array) -> Tensor:
    """Copy values to a device, from page-locked memory if they are the host's, so that the host waits for nothing.

    Returns:
        The values on the device; themselves where they are there. Of an array that may not be written, a copy.
    """
    if isinstance(values, np.ndarray):  # torch warns of one that may not be written
        own = torch.from_numpy(values if values.flags.writeable else values.copy())
    else:
        own = values
    if is_host(device) or own.device == device:
        return own
    return (own.pin_memory() if has_streams(device) and is_host(own.device) else own).to(
        device, non_blocking=True
    )


def read_on_host(values: Tensor) -> Tensor:
    """Copy values of a device to the host, which waits for them on a stream beside, and not for what comes after them.

    Returns:
        The values in the host's memory; themselves where they are there.
    """
    if not has_streams(values.device):
        return values.cpu()
    side = _reading_stream(values.device)
    side.wait_stream(torch.accelerator.current_stream(values.device))
    with side:
        copy = torch.empty(values.shape, dtype=values.dtype, device="cpu").pin_memory()
        copy.copy_(values, non_blocking=True)
        event = side.record_event()
    wait_for_event(event)  # and so the device keeps the values until they are copied
    return copy


@cache
def _reading_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


def wait_for_event(event: torch.Event) -> None:
    """Make the host wait for an event of a device: the only such wait of a step."""
    event.synchronize()


def stream_key(device: torch.device) -> tuple[torch.device, int]:
    """Key of what is kept for a device's current stream.

    A tensor that is made on one stream is ready for work queued there. Another stream would have to wait for it, and
    the allocator be told of that reader, so each stream has its own.
    """
    return device, torch.accelerator.current_stream(device).stream_id if has_streams(device) else 0


class Constant:
    """Host values that are copied to a device once for each of its streams that reads them, when it first does.

    Args:
        values: values that do not change.
    """

    def __init__(self, values: Tensor | Array) -> None:
        self.values = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
        self._sent: dict[tuple[torch.device, int], Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """The values on a device, for its current stream."""
        if device.type == "cpu":  # as is_host, which a step would call for each
            return self.values
        key = stream_key(device)
        if key not in self._sent:
            self._sent[key] = sent_to(device, self.values)
        return self._sent[key]


def with_index(device: torch.device) -> torch.device:
    """Return a device with its number: of an accelerator without one the current, or else that of ``LOCAL_RANK``.

    Ranks that never call ``torch.cuda.set_device`` all have the current device 0, and would share it.

    Raises:
        UnsupportedError: this machine has no such accelerator.
    """
    given: int | None = device.index
    if is_host(device) or given is not None or device.type == "meta":
        return device
    if not has_accelerator(device.type):
        raise UnsupportedError(
            f"there is no {device.type!r} device for tables: torch {torch.__version__} finds "
            f"{torch.accelerator.current_accelerator() if torch.accelerator.is_available() else 'none'} here. Give "
            "device_type='cpu', or leave it out; `shardwright doctor` shows what is installed. Planning for such "
            "devices, by a Topology, needs none",
            subject=device.type,
        )
    current, told = torch.accelerator.current_device_index(), os.environ.get("LOCAL_RANK", "")
    local = int(told) if told.isdecimal() else 0
    is_unset = current == 0 and local < torch.accelerator.device_count()
    return torch.device(device.type, local if is_unset else current)


def make_current(device: torch.device) -> None:
    """Make an accelerator this process's current device, on which kernels are launched and collectives made.

    Nothing is done for other devices, and on a machine without such accelerators.
    """
    if has_accelerator(device.type) and torch.accelerator.current_device_index() != device.index:
        torch.accelerator.set_device_index(device.index)


def memory_bytes(device_type: str) -> int | None:
    """Bytes of the memory of this machine's smallest accelerator; ``None`` if it has none of the type.

    Args:
        device_type: such as ``"cuda"``.
    """
    if not has_accelerator(device_type):
        return None
    module = torch.get_device_module(device_type)
    if not hasattr(module, "get_device_properties"):
        return None
    found = [module.get_device_properties(index) for index in range(torch.accelerator.device_count())]
    return min(int(own.total_memory) for own in found)


def has_accelerator(device_type: str) -> bool:
    """Tell whether this machine has an accelerator of a type, such as ``"cuda"``."""
    if not torch.accelerator.is_available():
        return False
    found = torch.accelerator.current_accelerator()
    return found is not None and found.type == device_type
