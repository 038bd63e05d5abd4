"""Collectives over a process group of ``torch.distributed``; comm backends choose the group's backend."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.contracts.comm_backend import Arrivals, Communicator, Work
from shardwright.errors import DistributedError
from shardwright.runtime.ranks.lockstep import by_rank
from shardwright.runtime.ranks.phases import Named, Phases

EXCHANGE_EVENT = "shardwright::all_to_all"
"""What an all-to-all that is none of ``torch.distributed``'s operators is called in a profile."""


class AllToAll(
    NamedTuple
):  # made four times a step, which attrs' frozen classes take several times as long for
    """What is exchanged.

    Args:
        output: see :meth:`Communicator.all_to_all`, as for the three that follow; ``None``: pieces are read where
            they arrive.
        input: see there.
        output_splits: see there.
        input_splits: see there.
        patience: how long starting it may wait for another rank's answer.
    """

    output: Tensor | None
    input: Tensor
    output_splits: Sequence[int]
    input_splits: Sequence[int]
    patience: timedelta | None


class Transport(ABC):
    """How an all-to-all is made, and of what memory its pieces are best sent."""

    @abstractmethod
    def start(self, call: AllToAll) -> Any:
        """Start one.

        Returns:
            Something whose ``wait(timeout)`` returns when the output may be read, or with the pieces, which its
            ``release()`` gives back.
        """

    @abstractmethod
    def room(self, num_elements: int, device: torch.device) -> Tensor:
        """See :meth:`Communicator.room`."""

    @abstractmethod
    def reads_in_place(self, num_elements: int, patience: timedelta | None) -> bool:
        """See :meth:`Communicator.reads_in_place`; ``patience`` as in :class:`AllToAll`."""


class _ReceivedPieces:
    """What arrives, in memory of this rank's own."""

    def __init__(self, work: Any, pieces: Sequence[Tensor]) -> None:
        self._work, self._pieces = work, pieces

    def wait(self, *timeout: timedelta) -> Sequence[Tensor]:
        self._work.wait(*timeout)
        return self._pieces

    def release(self) -> None:
        self._pieces = ()


class TorchTransport(Transport):
    """The process group's own."""

    def __init__(self, process_group: Any) -> None:
        self._group = process_group

    def start(self, call: AllToAll) -> Any:  # noqa: D102 - described in the base class
        splits, sent_splits = list(call.output_splits), list(call.input_splits)
        received = call.input.new_empty(sum(splits)) if call.output is None else call.output
        work = dist.all_to_all_single(
            received, call.input, splits, sent_splits, group=self._group, async_op=True
        )
        return work if call.output is not None else _ReceivedPieces(work, received.split(splits))

    def room(self, num_elements: int, device: torch.device) -> Tensor:  # noqa: D102
        return torch.empty(num_elements, dtype=torch.float32, device=device)

    def reads_in_place(self, num_elements: int, patience: timedelta | None) -> bool:  # noqa: D102
        return False


class _LabelledWork:
    """A collective whose failure says what was exchanged, and which ranks were not in it."""

    def __init__(self, work: Any, label: str, communicator: TorchCommunicator, *kept: Tensor) -> None:
        self._work, self._label, self._communicator = work, label, communicator
        self._kept = kept  # the backend reads and writes these until it is done

    def wait(self) -> Any:
        with self._communicator.named(f"the exchange of {self._label}"):
            result = self._communicator.wait_for(self._work)
        self._kept = ()
        return result

    def release(self) -> None:
        self._work.release()


class TorchCommunicator(Communicator):
    """The collectives of ``torch.distributed`` over one process group.

    A collective that fails raises ``DistributedError`` within the group's time-out; it names the collective, this
    rank, and the ranks of which there is no word.

    Args:
        process_group: the group; every rank of it makes the same calls in the same order.
        device: where small control messages live (the CPU, or the rank's accelerator).
        transport: how :meth:`all_to_all` is made, if not as the group does.
        beside: sends tensors in host memory among the same ranks, if this does not: headers, and objects.
        phases: of the ranks, where the group is beside another whose they are.
        close: ends what is under way over the group, which another rank will not come to. The group cannot be used
            after that; without this, a process may only end when the group's time-out has.
    """

    def __init__(
        self,
        process_group: Any,
        device: torch.device,
        transport: Transport | None = None,
        close: Callable[[], None] = lambda: None,
        *,
        beside: Communicator | None = None,
        phases: Phases | None = None,
    ) -> None:
        self._group, self._close, self._beside = process_group, close, beside
        self._device = device
        self._transport = transport or TorchTransport(process_group)
        self._phases = phases or Phases.of(process_group)
        # Where waiting with a limit of its own would block a device's stream, there is none.
        self._patience = self._phases.failure_reports.patience if device.type == "cpu" else None
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self._global_ranks = dist.get_process_group_ranks(process_group)

    @property
    def global_ranks(self) -> Sequence[int]:  # noqa: D102 - described in the base class
        return self._global_ranks

    def named(self, collective: str, since: float | None = None) -> Named:
        """What fails inside is the failure of that collective."""
        return self._phases.named(collective, since)

    def wait_for(self, work: Any) -> Any:
        """Wait no longer than leaves time to ask who is missing."""
        return work.wait() if self._patience is None else work.wait(self._patience)

    def _run(self, collective: str, start: Callable[[], Any]) -> None:
        """Start a collective and wait for it."""
        with self.named(collective):
            self._wait_watching(start())

    def _wait_watching(self, work: Any) -> None:
        """Wait for a collective of torch's, as :meth:`wait_for`, or until another rank fails in the phase under way."""
        if self._patience is None:
            work.wait()
            return
        try:
            self._phases.wait(work, self._patience)
        except DistributedError:
            self._close()
            raise

    def all_to_all(  # noqa: D102 - described in the base class
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        *,
        label: str = "",
    ) -> Work:
        with self.named(f"the exchange of {label}"):
            work = self._transport.start(AllToAll(output, input, output_splits, input_splits, self._patience))
        return _LabelledWork(work, label, self, output, input)

    def exchange(  # noqa: D102
        self, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], *, label: str = ""
    ) -> Arrivals:
        if isinstance(self._transport, TorchTransport):  # saves no copy: all pass by all_to_all
            return super().exchange(input, output_splits, input_splits, label=label)
        with self.named(f"the exchange of {label}"):
            work = self._transport.start(AllToAll(None, input, output_splits, input_splits, self._patience))
        return _LabelledWork(work, label, self, input)

    def room(self, num_elements: int, device: Any) -> Tensor:  # noqa: D102
        return self._transport.room(num_elements, device)

    def reads_in_place(self, num_elements: int) -> bool:  # noqa: D102
        with self.named("the search for memory to share"):
            return self._transport.reads_in_place(num_elements, self._patience)

    def on_cpu(self) -> Communicator | None:  # noqa: D102
        return self._beside

    def broadcast(self, tensor: Tensor, source: int) -> None:  # noqa: D102
        self._run(
            f"a broadcast from rank {self._global_ranks[source]}", lambda: self._sent_from(source, tensor)
        )

    def all_gather(self, tensor: Tensor) -> list[Tensor]:  # noqa: D102
        told = self.all_gather_objects((tensor.dtype, tuple(tensor.shape)))
        dtypes = [str(dtype) for dtype, _ in told]
        if len(set(dtypes)) > 1:  # which the backend would end the process for
            raise DistributedError(
                f"the ranks gather tensors of different dtypes: {by_rank(dtypes, self._global_ranks)}"
            )
        gathered = []
        for source, (_, shape) in enumerate(told):
            piece = tensor.contiguous() if source == self.rank else tensor.new_empty(shape)
            self.broadcast(piece, source)
            gathered.append(piece)
        return gathered

    def all_gather_objects(self, value: Any) -> list[Any]:  # noqa: D102
        if self._beside is not None:
            return self._beside.all_gather_objects(value)
        own = self._pickled(value)
        with self.named("a gathering of objects"):
            sizes = [int(size) for size in self._gathered(own.new_tensor([own.numel()], dtype=torch.int64))]
            padded = own.new_zeros(max(sizes))
            padded[: own.numel()] = own
            pieces = self._gathered(padded)
        return [_unpickled(piece[:size]) for piece, size in zip(pieces, sizes, strict=True)]

    def _gathered(self, own: Tensor) -> list[Tensor]:
        """Every rank's tensor, all of one size."""
        pieces = [torch.empty_like(own) for _ in range(self.world_size)]
        self._wait_watching(dist.all_gather(pieces, own, group=self._group, async_op=True))
        return pieces

    def broadcast_object(self, value: Any, source: int = 0) -> Any:  # noqa: D102
        if self._beside is not None:
            return self._beside.broadcast_object(value, source)
        own = self._pickled(value if self.rank == source else None)
        with self.named(f"a broadcast of an object from rank {self._global_ranks[source]}"):
            size = own.new_tensor([own.numel()], dtype=torch.int64)
            self._wait_watching(self._sent_from(source, size))
            piece = own if self.rank == source else own.new_empty(int(size))
            self._wait_watching(self._sent_from(source, piece))
        return value if self.rank == source else _unpickled(piece)

    def _sent_from(self, source: int, tensor: Tensor) -> Any:
        return dist.broadcast(tensor, group=self._group, group_src=source, async_op=True)

    def _pickled(self, value: Any) -> Tensor:
        """A value as bytes, where control messages live."""
        return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self._device)

    def barrier(self) -> None:  # noqa: D102
        self._run("a barrier", lambda: dist.barrier(group=self._group, async_op=True))

    def meet(self, place: str, what: str) -> None:  # noqa: D102
        with self.named(what):
            self._phases.failure_reports.meet(place, what, self._phases.look)


def _unpickled(values: Tensor) -> Any:
    return pickle.loads(values.cpu().numpy().tobytes())
