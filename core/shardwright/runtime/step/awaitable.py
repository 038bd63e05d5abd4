"""Results under way, waited for on first use."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch.utils._pytree as pytree

from shardwright.arguments import UnderWay
from shardwright.runtime.step.compiling import untraced

T = TypeVar("T")


class Awaitable(ABC, Generic[T]):
    """Work that was begun; :meth:`wait` returns its result, the same one each time."""

    _result: T
    _error: Exception

    @abstractmethod
    def _wait_impl(self) -> T:
        """Wait for the result and return it; called once."""

    @untraced
    def wait(self) -> T:
        """Wait for the result and return it; an error is raised by each call."""
        if "_error" in self.__dict__:
            raise self._error
        if "_result" not in self.__dict__:
            try:
                self._result = self._wait_impl()
            except Exception as error:
                self._error = error  # what is under way cannot be waited for twice
                raise
        return self._result


class LazyAwaitable(Awaitable[T], UnderWay):
    """An awaitable that waits by itself on first use.

    Reading an attribute or item of it, or passing it to a function of torch or of the classes of batches and results,
    waits and goes on with the result, so that code written for the unsharded module runs on a sharded one, and waits as
    late as it can.

    Subclasses implement ``_wait_impl`` and call ``super().__init__()``.
    """

    def __init__(self) -> None:
        """Start nothing: the result is computed by the first ``wait``."""

    def __getattr__(self, name: str) -> Any:
        # Only for names that are not found; private ones must not start a wait (copy and pickle probe for them).
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.wait(), name)

    def __getitem__(self, key: Any) -> Any:
        return self.wait()[key]  # type: ignore[index]  # whether the result has items is the caller's knowledge

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Wait for every awaitable among the arguments, then call ``func``."""
        args, kwargs = pytree.tree_map_only(
            LazyAwaitable, lambda item: item.wait(), (args, dict(kwargs or {}))
        )
        return func(*args, **kwargs)


def _on_results(function: Callable[..., Any], order: int) -> Callable[..., Any]:
    return lambda *operands: function(
        *pytree.tree_map_only(LazyAwaitable, lambda item: item.wait(), operands)[::order]
    )


# Python looks operators up on the class, so __getattr__ does not see them.
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_OTHERS = ("neg", "abs", "lt", "le", "gt", "ge", "contains")
for _name, _function, _order in (
    *((f"__{name}__", getattr(operator, f"__{name}__"), 1) for name in (*_BINARY, *_OTHERS)),
    *((f"__r{name}__", getattr(operator, f"__{name}__"), -1) for name in _BINARY),
    *(("__len__", len, 1), ("__iter__", iter, 1)),
):
    setattr(LazyAwaitable, _name, _on_results(_function, _order))


class LazyCall(LazyAwaitable[T]):
    """A lazy awaitable over a function without arguments."""

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__()
        self._function: Callable[[], T] | None = function

    def _wait_impl(self) -> T:
        assert self._function is not None  # called once
        result = self._function()
        self._function = None  # lets go of what the step no longer needs
        return result
