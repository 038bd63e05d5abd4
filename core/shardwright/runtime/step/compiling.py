"""Functions that ``torch.compile`` leaves untraced, because they call collectives or kernels of tables.

A compiled model has one graph break for each call of a collection, which waits for the results there. The dense layers
are compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

_P = ParamSpec("_P")
_R = TypeVar("_R")


def untraced(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap ``function`` so that neither it nor anything it calls is traced."""
    # torch.compiler.disable does the same, but imports torch's compiler at once, which takes seconds.
    outside: Callable[_P, _R] = torch._disable_dynamo(function)  # type: ignore[attr-defined]

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch.compiler.is_dynamo_compiling() and get_eval_frame_callback() is None:
            return function(*args, **kwargs)  # nothing is compiled or traced now
        # If the wrapped function itself were untraced, torch would compile nothing of its caller.
        return outside(*args, **kwargs)

    return call


@untraced
def waited_for(collection: Callable[..., Any], features: Any) -> Any:
    """Call a collection and wait for its result: a traced graph cannot break at the first use of an awaitable."""
    return collection(features).wait()
