"""A switch that scripts set before they trace models for other devices."""

from __future__ import annotations

_propagates = {"device": False}


def set_propogate_device(val: bool) -> None:
    """Set the switch. It changes nothing: modules take the device of their inputs in any case."""
    _propagates["device"] = val


def get_propogate_device() -> bool:
    """The value that was set; false at first."""
    return _propagates["device"]
