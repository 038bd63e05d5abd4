"""A counter of the collectives that a piece of work makes."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.contracts.comm_backend import EXCHANGE_EVENT

_EVENT_BEGINS = "profiler::_record_function_enter_new"  # what torch.profiler.record_function calls


class CollectiveCounter(TorchDispatchMode):
    """A context that counts collectives.

    It counts the operators of ``torch.distributed``, as torch's ``CommDebugMode`` does, which is slow to import. It
    also counts all-to-alls of other transports, by the events that they record.

    Attributes:
        count: number of collectives so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count the operator if it is a collective, and call it."""
        self.count += func.namespace == "c10d" or (func.name() == _EVENT_BEGINS and args[0] == EXCHANGE_EVENT)
        return func(*args, **(kwargs or {}))
