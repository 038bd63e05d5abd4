"""`torch.fx` traces of models with quantised tables."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any

import torch.fx
from torch import nn

import shardwright as sw
from shardwright_torchrec.quant.collections import QuantizedCollection
from shardwright_torchrec.quant.sharding import PlacedCollection

__all__ = ["Tracer", "symbolic_trace"]


class Tracer(torch.fx.Tracer):
    """Traces a model; collections of tables are leaves, whose calls stand in the graph as they are.

    Args:
        leaf_modules: the names of further classes that are leaves.
    """

    def __init__(self, leaf_modules: Sequence[str] | None = None) -> None:
        super().__init__()
        self._leaf_modules = tuple(leaf_modules or ())

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """True if a module's call is one node of the graph."""
        is_ours = isinstance(
            m, QuantizedCollection | PlacedCollection | sw.EmbeddingBagCollection | sw.EmbeddingCollection
        )
        named = type(m).__name__ in self._leaf_modules
        return is_ours or named or super().is_leaf_module(m, module_qualified_name)

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> torch.fx.Graph:
        """The graph of a model.

        Raises:
            UnsupportedError: it is a quantised collection by itself, whose call would be the whole graph.
        """
        if isinstance(root, QuantizedCollection | PlacedCollection):
            raise sw.UnsupportedError(
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
    """Trace a model and make a module of the graph."""
    return torch.fx.GraphModule(root, Tracer(leaf_modules).trace(root, concrete_args))
