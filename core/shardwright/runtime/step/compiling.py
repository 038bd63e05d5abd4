"""What ``torch.compile`` leaves as it is: collectives, and the kernels of tables, are nothing that it could trace.

A compiled model has one break for each call of a collection, whose results are waited for there; what is dense is
compiled. Each call that is left out costs a microsecond, compiled or not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def untraced(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``function``, which is never traced, and nothing that it calls."""
    # torch.compiler.disable does the same, but imports torch's compiler at once, which takes seconds.
    outside: Callable[_P, _R] = torch._disable_dynamo(function)  # type: ignore[attr-defined]

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        # Were the function itself what is not traced, torch would compile nothing of who calls it.
        return outside(*args, **kwargs)

    return call


@untraced
def waited_for(collection: Callable[..., Any], features: Any) -> Any:
    """What a collection gives for a batch, waited for: a graph cannot be left on the first use of what is to come."""
    return collection(features).wait()
