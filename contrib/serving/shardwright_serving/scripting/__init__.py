"""TorchScript and `torch.fx` of models with tables.

`install()` lets `torch.jit.script` and traces take the sparse types and the collections of float tables, and
`torch.jit.load` give them back, in this process; until then neither knows them. Quantized collections are
taken without it, in models whose arguments are tensors.
"""

from __future__ import annotations

from typing import Any

from shardwright import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
)
from shardwright_serving.scripting.floats import scriptable_collection
from shardwright_serving.scripting.script_classes import register_script_types
from shardwright_serving.scripting.script_functions import function_for
from shardwright_serving.scripting.traces import Tracer, made, made_or_traced, symbolic_trace, traced

__all__ = ["Tracer", "install", "symbolic_trace", "uninstall"]

_TYPES: tuple[type[Any], ...] = (JaggedTensor, KeyedJaggedTensor, KeyedTensor)
_COLLECTIONS: tuple[type[Any], ...] = (EmbeddingBagCollection, EmbeddingCollection)
_PREPARE = "__prepare_scriptable__"
"""Name under which `torch.jit.script` asks for what it compiles in the place of something."""
_NAME_IN_SCRIPTS = "_jit_override_qualname"
"""Name that TorchScript asks a class for before it looks for a class of its own."""

_before: dict[type[Any], dict[str, staticmethod[..., Any]]] = {}
"""Static functions of each sparse type, as they were before :func:`install`."""


class _Registering:
    """An attribute that no class has: who asks for it has the types registered."""

    def __get__(self, instance: object, owner: type[Any]) -> str:
        register_script_types()
        raise AttributeError(_NAME_IN_SCRIPTS)


def install(*, lazily: bool = False) -> None:
    """Let TorchScript and `torch.fx` take the sparse types and float collections; a second call does nothing.

    It changes the classes of this process: their ``__new__``, their static functions, and what `torch.jit.script` asks
    them for. A batch is then made a few microseconds more slowly.

    Args:
        lazily: compile the types when `torch.jit.script` first meets one. It saves a second where nothing is scripted;
            until then `torch.jit.load` does not know them.
    """
    if not lazily:
        register_script_types()
    if _before:
        return
    for kind in _TYPES:
        setattr(kind, _NAME_IN_SCRIPTS, _Registering())
        static = {
            name: own for name, own in vars(kind).items() if isinstance(own, staticmethod) and name[0] != "_"
        }
        _before[kind] = static
        kind.__new__ = made_or_traced  # type: ignore[assignment]
        for name, own in static.items():
            setattr(kind, name, staticmethod(_taken(own.__func__)))
    for collection in _COLLECTIONS:
        setattr(collection, _PREPARE, scriptable_collection)


def _taken(function: Any) -> Any:
    """A static function of a sparse type, as traces and TorchScript take it."""
    call = traced(function)
    setattr(call, _PREPARE, lambda: function_for(function.__qualname__))
    return call


def uninstall() -> None:
    """Take back what :func:`install` changed; TorchScript goes on to know the types."""
    for kind, static in _before.items():
        delattr(kind, _NAME_IN_SCRIPTS)
        kind.__new__ = made  # type: ignore[assignment]
        for name, own in static.items():
            setattr(kind, name, own)
    for collection in _COLLECTIONS if _before else ():
        delattr(collection, _PREPARE)
    _before.clear()
