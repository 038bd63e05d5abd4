"""Return paths of core's dataflows, by class; a plugin's dataflow names its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from shardwright.errors import UnsupportedError
from shardwright.planning.layouts.layout import Exchange, Hierarchical, Routed
from shardwright.runtime.routed.direct import DirectReturn
from shardwright.runtime.routed.hierarchical import HostReturn
from shardwright.runtime.routed.return_path import ReturnPath

# Dataflow -> the path of pooled results, and that of sequences.
_PATHS: Final[Mapping[type, tuple[type[ReturnPath], type[ReturnPath]]]] = {
    Exchange: (DirectReturn, DirectReturn),
    Hierarchical: (HostReturn, DirectReturn),
}


def return_path_of(dataflow: Routed, *, is_pooled: bool) -> Callable[..., ReturnPath]:
    """The return path of a dataflow, as a class or another callable that makes one.

    Args:
        dataflow: dataflow of some blocks of a layout.
        is_pooled: there is one result per bag, else one per id.

    Raises:
        UnsupportedError: neither the dataflow nor a class that it derives from names a path.
    """
    own: Callable[..., ReturnPath] | None = dataflow.return_path(is_pooled=is_pooled)
    if own is not None:
        return own
    for owner in type(dataflow).__mro__:
        if owner in _PATHS:
            pooled, sequences = _PATHS[owner]
            return pooled if is_pooled else sequences
    raise UnsupportedError(
        f"dataflow {dataflow.name!r}: {type(dataflow).__qualname__}.return_path() gave None, which only a class "
        "derived from Exchange or Hierarchical may; return a ReturnPath"
    )
