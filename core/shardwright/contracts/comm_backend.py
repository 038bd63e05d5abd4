"""The contract of a comm backend: the collectives over one kind of process group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from shardwright.contracts.names import OpenNames
from shardwright.contracts.reduction import Reduction

if TYPE_CHECKING:
    import torch
    from torch import Tensor

EXCHANGE_EVENT = "shardwright::all_to_all"
"""Name in profiles of an all-to-all that is no operator of ``torch.distributed``."""


class Work(Protocol):
    """A collective in progress."""

    def wait(self) -> Any:
        """Return when the output may be read, at once if asked again; raise if the collective failed or timed out."""


class Arrivals(Protocol):
    """Pieces that are being sent, to be read where they arrive."""

    def wait(self) -> Sequence[Tensor]:
        """The piece from each rank, to be read until :meth:`release`; raise if the collective failed or timed out."""

    def release(self) -> None:
        """Say that the pieces are not read any more."""


class _Arrived:
    """Pieces in memory of this rank's own."""

    def __init__(self, work: Work, output: Tensor, splits: Sequence[int]) -> None:
        self._work, self._output, self._splits = work, output, splits

    def wait(self) -> Sequence[Tensor]:
        self._work.wait()
        stops = list(accumulate(self._splits, initial=0))
        return [self._output[start:stop] for start, stop in pairwise(stops)]

    def release(self) -> None:
        """Nobody else waits for this memory."""


class Communicator(ABC):
    """The collectives among the ranks of one group, as one rank sees them.

    Every rank makes the same calls in the same order. Autograd over them is the engine's business.
    """

    rank: int
    world_size: int
    device: torch.device | None = None
    """The device whose tensors are sent; ``None``: any of the backend's."""

    @abstractmethod
    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        *,
        label: str = "",
    ) -> Work:
        """Send ``input``'s pieces to the ranks and receive theirs into ``output``, asynchronously.

        Args:
            output: ``[sum(output_splits)]``, contiguous, of ``input``'s dtype.
            input: ``[sum(input_splits)]``, contiguous.
            output_splits: elements received from each rank; zeros are allowed.
            input_splits: elements sent to each rank; zeros are allowed.
            label: name of what is exchanged, for errors and traces.
        """

    def exchange(
        self, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], *, label: str = ""
    ) -> Arrivals:
        """Exchange for a receiver that reads what arrives only once; a backend may then save it a copy."""
        output = input.new_empty(sum(output_splits))
        work = self.all_to_all(output, input, output_splits, input_splits, label=label)
        return _Arrived(work, output, output_splits)

    def all_reduce(self, values: Tensor, *, mean: bool = False, label: str = "") -> Work:
        """Add up values over the ranks, in place: in rank order, in float32 at least, with the same bits everywhere.

        Each rank sends and receives ``2 (W - 1) / W`` times the values. The second of two exchanges is in ``wait()``,
        so all ranks wait for what they reduce in one order.

        Args:
            values: ``[N]``, contiguous, of one floating dtype everywhere; read when the work was waited for.
            mean: divide the sums by the number of ranks, before they are rounded to the dtype.
            label: name of what is added up, for errors and traces; the second exchange is called ``sums of`` it.
        """
        return Reduction(self.exchange, self.rank, self.world_size, values, mean=mean, label=label)

    def room(self, num_elements: int, device: Any) -> Tensor:
        """Memory ``[num_elements]`` float32, not set, for what :meth:`all_to_all` is to send.

        A backend may have such from which sending takes no copy. So what is sent from it may only be changed when its
        receivers have said, by a later collective that was waited for, that they waited for this one.
        """
        import torch

        return torch.empty(num_elements, dtype=torch.float32, device=device)

    def reads_in_place(self, num_elements: int) -> bool:
        """True if so many float32 values from :meth:`room`, sent by :meth:`exchange`, are read where they are.

        All ranks ask together, and get the same answer.
        """
        return False

    def on_cpu(self) -> Communicator | None:
        """Return the communicator of CPU tensors among the same ranks, where :meth:`all_to_all` does not send them.

        Headers, which the host reads, then travel by it, and neither wait for a device nor for what it is to send.
        ``None``: they travel as everything else.
        """
        return None

    @property
    def global_ranks(self) -> Sequence[int]:
        """The numbers by which errors name these ranks, in rank order: their numbers in the job."""
        return range(self.world_size)

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Fill ``tensor`` (contiguous, of one shape and dtype everywhere) with rank ``source``'s. Waits."""

    @abstractmethod
    def all_gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable ``value``, in rank order. Waits."""

    @abstractmethod
    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Rank ``source``'s ``value`` on every rank. Waits."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has come here."""

    def named(self, collective: str, since: float | None = None) -> AbstractContextManager[None]:
        """Report a failure inside as that of a collective that torch makes; by default the error is left as it is.

        Args:
            collective: its name, for the error.
            since: start of the collective, on the monotonic clock, s; now by default.
        """
        return nullcontext()

    def wait_for(self, work: Work) -> Any:
        """Wait for a collective that torch began; a communicator may leave itself time to ask who is missing."""
        return work.wait()


class CommBackend(ABC, metaclass=OpenNames):
    """Collectives over the process groups of one backend of ``torch.distributed`` (or something beside it)."""

    name: ClassVar[str]
    api: ClassVar[int] = 1
    aliases: ClassVar[tuple[str, ...]] = ()
    devices: ClassVar[tuple[str, ...]]
    """Types of the devices whose tensors it can send, the preferred first."""

    @abstractmethod
    def connect(self, process_group: Any) -> Communicator:
        """The communicator over ``process_group``."""
