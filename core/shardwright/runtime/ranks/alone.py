"""The collectives of a process that trains alone: it receives what it sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from torch import Tensor

from shardwright.contracts.comm_backend import Communicator, Work


@final
class LoneCommunicator(Communicator):
    """The only rank of a world of one, which needs no process group."""

    rank, world_size = 0, 1

    def all_to_all(  # noqa: D102 - described in the base class
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        *,
        label: str = "",
    ) -> Work:
        output.copy_(input)
        return CompletedWork()

    def on_cpu(self) -> Communicator:  # noqa: D102
        return self  # a header on a device would have to come back

    def broadcast(self, tensor: Tensor, source: int) -> None:  # noqa: D102
        pass

    def all_gather_objects(self, value: Any) -> list[Any]:  # noqa: D102
        return [value]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:  # noqa: D102
        return value

    def barrier(self) -> None:  # noqa: D102
        pass


class CompletedWork:
    """A collective that ended when it started."""

    def wait(self) -> None:
        """Return at once."""
