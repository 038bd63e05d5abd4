"""Counting the collectives that a piece of work makes."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CollectiveCounter(TorchDispatchMode):
    """Counts the operators of torch.distributed, as torch's CommDebugMode does, which is slow to import."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count and call."""
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))
