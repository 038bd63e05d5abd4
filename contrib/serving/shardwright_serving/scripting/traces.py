"""`torch.fx` traces of models with tables: making a batch is one node of the graph, and so is a collection's call.

A constructor that is given the stand-ins of a trace, which have no contents yet, could check and derive nothing.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.fx import Proxy
from torch.fx._symbolic_trace import is_fx_symbolic_tracing  # where torch keeps the flag differs by release

from shardwright import EmbeddingBagCollection, EmbeddingCollection, TableCollection, UnsupportedError
from shardwright_serving.scripting.floats import scriptable_collection

_F = TypeVar("_F", bound=Callable[..., Any])


def made(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
    """A new instance, ``__new__`` of a class: Python gives none back its own once it had another."""
    return object.__new__(cls)


def made_or_traced(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
    """A new instance, or a node of the trace that makes one: then the class's ``__init__`` is not called."""
    if (proxy := _proxy_of(args, kwargs)) is None:
        return object.__new__(cls)
    return proxy.tracer.create_proxy("call_function", cls, args, kwargs)


def traced(function: _F) -> _F:
    """Make calls of a function one node of a trace, if an argument is one of the trace's stand-ins.

    Args:
        function: a function that makes or joins sparse types.

    Returns:
        The function; without a stand-in it is called as it is.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if (proxy := _proxy_of(args, kwargs)) is None:
            return function(*args, **kwargs)
        return proxy.tracer.create_proxy("call_function", call, args, kwargs)

    return cast(_F, call)


def _proxy_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Proxy | None:
    """A stand-in among the arguments of a call, if there is a trace; compiled and exported programs have none."""
    if torch.compiler.is_compiling() or not is_fx_symbolic_tracing():
        return None
    return _first_proxy((args, kwargs))


def _first_proxy(value: Any) -> Proxy | None:
    """A stand-in among arguments, also within lists and mappings."""
    if isinstance(value, Proxy):
        return value
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return next((found for one in value if (found := _first_proxy(one)) is not None), None)
    return None


class Tracer(torch.fx.Tracer):
    """Traces a model; collections of tables are leaves, whose calls stand in the graph as they are.

    Traces need :func:`shardwright_serving.scripting.install`.

    Args:
        leaf_modules: the names of further classes that are leaves.
    """

    def __init__(self, leaf_modules: Sequence[str] | None = None) -> None:
        super().__init__()
        self._leaf_modules = tuple(leaf_modules or ())

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """True if a module's call is one node of the graph."""
        named = type(m).__name__ in self._leaf_modules
        return isinstance(m, TableCollection) or named or super().is_leaf_module(m, module_qualified_name)

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> torch.fx.Graph:
        """The graph of a model; of a collection of float tables by itself, that of its lookups.

        Raises:
            UnsupportedError: it is another collection by itself, whose call would be the whole graph.
        """
        if isinstance(root, EmbeddingBagCollection | EmbeddingCollection):
            root = scriptable_collection(root)
        elif isinstance(root, TableCollection):
            raise UnsupportedError(
                f"{type(root).__name__} is a leaf of traces, so that there is none of it alone: "
                "trace the model around it"
            )
        graph = super().trace(root, concrete_args)
        _resolve_types(graph, root.forward if isinstance(root, nn.Module) else root)
        return graph


def _resolve_types(graph: torch.fx.Graph, function: Any) -> None:
    """Put types for annotations that are text: TorchScript, which may compile the graph, cannot read it."""
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError):  # a name that only type checkers import
        hints = {}
    for node in graph.nodes:
        if isinstance(node.type, str):
            node.type = hints.get("return" if node.op == "output" else node.name)


def symbolic_trace(
    root: nn.Module,
    concrete_args: dict[str, Any] | None = None,
    leaf_modules: Sequence[str] | None = None,
) -> torch.fx.GraphModule:
    """Trace a model and make a module of the graph; see :class:`Tracer`."""
    return torch.fx.GraphModule(root, Tracer(leaf_modules).trace(root, concrete_args))
