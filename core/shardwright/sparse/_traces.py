"""`torch.fx` traces of code that makes the sparse types: each construction is one node of the graph.

A constructor that is given the stand-ins of a trace, which have no contents yet, could check and derive nothing.
"""

from __future__ import annotations

import functools
from abc import ABCMeta
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.fx import Proxy
from torch.fx import ProxyableClassMeta as _ProxyableClassMeta  # type: ignore[attr-defined]  # exported by name only
from torch.fx._symbolic_trace import is_fx_symbolic_tracing  # where torch keeps the flag differs by release

_F = TypeVar("_F", bound=Callable[..., Any])


class TracedMeta(_ProxyableClassMeta, ABCMeta):
    """The metaclass of the sparse types: a trace takes down the construction, and does not look inside."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """An instance, or a node of the trace that makes one. Torch's own asks in a way that logs a warning."""
        if (proxy := _proxy_of(args, kwargs)) is None:
            return type.__call__(cls, *args, **kwargs)
        return proxy.tracer.create_proxy("call_function", cls, args, kwargs)

    @property
    def _jit_override_qualname(cls) -> str:
        """Nothing. TorchScript asks for it before it looks for a class of its own, which is made then."""
        from shardwright.sparse.scripting import register_script_types  # asked for by few

        register_script_types()
        raise AttributeError("_jit_override_qualname")


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


def scripted(function: _F) -> _F:
    """Have TorchScript compile the function of this name in `scripting`, where code calls this one.

    Args:
        function: a static function of a sparse type, whose checks TorchScript cannot compile.

    Returns:
        The function itself.
    """

    def prepared() -> Callable[..., Any]:
        from shardwright.sparse.scripting import function_for  # asked for by few

        return function_for(function.__qualname__)

    vars(function)["__prepare_scriptable__"] = prepared  # what TorchScript asks a function for
    return function


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
