"""Collectives over a process group of ``torch.distributed``, whose backend the comm backends choose."""

from __future__ import annotations

import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from attrs import define
from torch import Tensor

from shardwright.contracts.comm_backend import Arrivals, Communicator
from shardwright.errors import ShardwrightError
from shardwright.runtime.ranks.devices import is_host
from shardwright.runtime.ranks.group_ranks import GroupRanks, Named

_GATHERING = "a gathering of objects"


@define(eq=False)  # made four times a step, and a frozen class takes several times as long
class AllToAll:
    """The arguments of an all-to-all; see :meth:`Communicator.all_to_all`.

    Args:
        output: buffer that pieces arrive in, rank after rank; ``None`` if they are read in the place they arrive in.
        input: pieces to send, rank after rank.
        output_splits: elements from each rank, ``[W]``.
        input_splits: elements to each rank, ``[W]``.
        patience: longest time that starting may wait for another rank's answer; ``None``: no limit.
    """

    output: Tensor | None
    input: Tensor
    output_splits: Sequence[int]
    input_splits: Sequence[int]
    patience: timedelta | None


class Transport(ABC):
    """An implementation of the all-to-all, and of the memory that its pieces are best sent from."""

    @abstractmethod
    def start(self, call: AllToAll) -> Any:
        """Start an all-to-all.

        Returns:
            An object whose ``wait(timeout)`` returns when the output may be read. Without an output it returns the
            pieces, and its ``release()`` gives them back.
        """

    @abstractmethod
    def room(self, num_elements: int, device: torch.device) -> Tensor:
        """Memory to send from, as :meth:`Communicator.room`."""

    @abstractmethod
    def reads_in_place(self, num_elements: int, patience: timedelta | None) -> bool:
        """True if pieces are read in the sender's memory, as :meth:`Communicator.reads_in_place`."""

    @abstractmethod
    def close(self) -> None:
        """Have ranks that wait for this one fail: it comes to no more exchange."""


class CollectiveWatch(ABC):
    """A watch over collectives that the device waits for, and not the host: a backend may bring one."""

    @abstractmethod
    def check(self) -> None:
        """Raise ``DistributedError`` if a collective that was waited for has failed since."""

    @abstractmethod
    def wait(self, label: str, work: Any) -> Any:
        """Make the device wait for a collective; return what its ``wait()`` does."""


class TorchTransport(Transport):
    """The transport of the process group itself."""

    def __init__(self, process_group: Any) -> None:
        self._group = process_group

    def start(self, call: AllToAll) -> Any:  # noqa: D102 - described in the base class
        splits, sent_splits = list(call.output_splits), list(call.input_splits)
        return dist.all_to_all_single(
            call.output, call.input, splits, sent_splits, group=self._group, async_op=True
        )

    def room(self, num_elements: int, device: torch.device) -> Tensor:  # noqa: D102
        return torch.empty(num_elements, dtype=torch.float32, device=device)

    def reads_in_place(self, num_elements: int, patience: timedelta | None) -> bool:  # noqa: D102
        return False

    def close(self) -> None:  # noqa: D102
        pass


class _LabelledWork:
    """A collective whose error names the exchange and the ranks that were not in it."""

    def __init__(
        self, work: Any, label: str, since: float, communicator: TorchCommunicator, call: AllToAll
    ) -> None:
        self._work, self._label, self._since, self._communicator = work, label, since, communicator
        self._call: AllToAll | None = call  # the backend reads and writes its tensors until it is done

    def wait(self) -> Any:
        own, collective, called = self._communicator, f"the exchange of {self._label}", time.monotonic()
        try:
            result = own.wait_for(self._work, collective, self._since)
        except RuntimeError:
            with own.named(collective, called):
                raise
        self._call = None
        return result

    def release(self) -> None:
        self._work.release()


class TorchCommunicator(Communicator):
    """The collectives of ``torch.distributed`` over one process group.

    A collective that fails raises ``DistributedError`` within the group's time-out. The error names the collective,
    this rank, and the ranks that sent no report.

    Args:
        process_group: the group; every rank of it makes the same calls in the same order.
        device: device of small control messages: the CPU, or the rank's accelerator.
        transport: transport of :meth:`all_to_all`; the group's own by default.
        close: function that ends collectives in progress that another rank will not come to. The group cannot be used
            after that. Without it, the process may be unable to end before the group's time-out, and others may wait
            for this rank until then.
        beside: communicator of the same ranks for host memory (headers and objects), if this one does not send it.
        watch: watch over collectives that the device waits for, and not the host.
    """

    def __init__(
        self,
        process_group: Any,
        device: torch.device,
        transport: Transport | None = None,
        close: Callable[[], None] = lambda: None,
        *,
        beside: Communicator | None = None,
        watch: CollectiveWatch | None = None,
    ) -> None:
        self._watch = watch
        self._group, self._close, self._beside = process_group, close, beside
        self.device = device
        self._transport = transport or TorchTransport(process_group)
        self._ranks = GroupRanks.of(process_group)
        self._ranks.communicators.add(self)
        # No limit on accelerators: waiting with one would block the device's stream.
        self._patience = self._ranks.store.patience if is_host(device) else None
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self._global_ranks = dist.get_process_group_ranks(process_group)

    @property
    def global_ranks(self) -> Sequence[int]:  # noqa: D102 - described in the base class
        return self._global_ranks

    def named(self, collective: str, since: float | None = None) -> AbstractContextManager[None]:
        """A context whose errors are raised as failures of that collective."""
        if self._watch is not None:
            self._watch.check()
        return Named(self._failure, collective, since)

    def _failure(self, collective: str, error: RuntimeError, since: float) -> ShardwrightError:
        """Make the error of a failed collective; ranks that wait for this one in another learn of it."""
        self._ranks.close()
        return self._ranks.failure(collective, error, since)

    def close(self) -> None:
        """End all collectives in progress, here and on the ranks that wait for this one; none can begin then."""
        self._transport.close()
        self._close()

    def wait_for(self, work: Any, collective: str = "a collective", since: float | None = None) -> Any:
        """Wait for a collective, but leave enough of the time-out to ask which ranks are missing.

        Args:
            work: the collective.
            collective: its name.
            since: time of its start on the monotonic clock, s, if it ends only when all ranks have come to it.
        """
        if self._watch is not None:
            self._watch.check()
            return self._watch.wait(collective, work)
        result = work.wait() if self._patience is None else work.wait(self._patience)
        if since is not None:
            self._ranks.store.all_came = since
        return result

    def _run(self, collective: str, start: Callable[[], Any]) -> None:
        """Start a collective and wait for it."""
        with self.named(collective):
            self._wait_watching(start(), collective)

    def _wait_watching(self, work: Any, collective: str) -> None:
        """Wait for a collective of torch, or until another rank fails in work that is done together."""
        if self._patience is None:
            self.wait_for(work, collective)
        else:
            self._ranks.wait(work, self._patience)

    def all_to_all(  # noqa: D102 - described in the base class
        self,
        output: Tensor | None,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        *,
        label: str = "",
    ) -> Arrivals:
        since, call = time.monotonic(), AllToAll(output, input, output_splits, input_splits, self._patience)
        if self._watch is not None:
            self._watch.check()
        try:
            work = self._transport.start(call)
        except RuntimeError:
            with self.named(f"the exchange of {label}", since):
                raise
        return _LabelledWork(work, label, since, self, call)

    def exchange(  # noqa: D102
        self, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], *, label: str = ""
    ) -> Arrivals:
        if isinstance(self._transport, TorchTransport):  # saves no copy: all pass by all_to_all
            return super().exchange(input, output_splits, input_splits, label=label)
        return self.all_to_all(None, input, output_splits, input_splits, label=label)

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

    def all_gather_objects(self, value: Any) -> list[Any]:  # noqa: D102
        if self._beside is not None:
            return self._beside.all_gather_objects(value)
        own = self._pickled(value)
        with self.named(_GATHERING):
            sizes = [int(size) for size in self._gathered(own.new_tensor([own.numel()], dtype=torch.int64))]
            padded = own.new_zeros(max(sizes))
            padded[: own.numel()] = own
            pieces = self._gathered(padded)
        return [_unpickled(piece[:size]) for piece, size in zip(pieces, sizes, strict=True)]

    def _gathered(self, own: Tensor) -> list[Tensor]:
        """Gather every rank's tensor, all of one size."""
        pieces = [torch.empty_like(own) for _ in range(self.world_size)]
        self._wait_watching(dist.all_gather(pieces, own, group=self._group, async_op=True), _GATHERING)
        return pieces

    def broadcast_object(self, value: Any, source: int = 0) -> Any:  # noqa: D102
        if self._beside is not None:
            return self._beside.broadcast_object(value, source)
        own = self._pickled(value if self.rank == source else None)
        with self.named(collective := f"a broadcast of an object from rank {self._global_ranks[source]}"):
            size = own.new_tensor([own.numel()], dtype=torch.int64)
            self._wait_watching(self._sent_from(source, size), collective)
            piece = own if self.rank == source else own.new_empty(int(size))
            self._wait_watching(self._sent_from(source, piece), collective)
        return value if self.rank == source else _unpickled(piece)

    def _sent_from(self, source: int, tensor: Tensor) -> Any:
        return dist.broadcast(tensor, group=self._group, group_src=source, async_op=True)

    def _pickled(self, value: Any) -> Tensor:
        """Pickle a value into bytes on the device of control messages."""
        return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self.device)

    def barrier(self) -> None:  # noqa: D102
        self._run("a barrier", lambda: dist.barrier(group=self._group, async_op=True))


def _unpickled(values: Tensor) -> Any:
    return pickle.loads(values.cpu().numpy().tobytes())
