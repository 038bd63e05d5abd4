"""A part of the engine: all tables of a module that share a way of moving ids, results and gradients.

The engine calls, on every rank and in this order: ``route`` (once a batch), ``headers``, ``send``, ``receive``,
``lookup``, ``views``, and, in training, ``send_gradients`` and ``update``. Headers of all parts travel in one
collective, which the engine makes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from attrs import frozen
from torch import Tensor

from shardwright.planning.plan import ParameterSharding
from shardwright.runtime.collection import Collection, FeatureBatch
from shardwright.runtime.environment import ShardingEnv
from shardwright.runtime.groups import Arrival, Group
from shardwright.runtime.lookup import Lookup


class GradientOf(ABC):
    """The gradients of pieces of the outputs, float32 ``[bags or ids, columns]``.

    Attributes:
        scale: by what :meth:`unscaled` ones are still to be multiplied.
    """

    scale: float

    @abstractmethod
    def __call__(self, arrival: Arrival) -> Tensor:
        """The gradient of one piece, averaged over ranks."""

    @abstractmethod
    def unscaled(self, arrivals: tuple[Arrival, ...]) -> list[Tensor]:
        """The gradients of several, not averaged yet: for who writes them in a row and multiplies all at once.

        Args:
            arrivals: the same object in every step, so that what follows from it is found once.
        """

    def side_by_side(self, arrivals: tuple[Arrival, ...], out: Tensor) -> None:
        """Write :meth:`unscaled` ones of pooled outputs side by side into ``out``, ``[bags, all columns]``."""
        torch.cat(self.unscaled(arrivals), dim=1, out=out)

    def changed(self, change: Callable[[Tensor], Tensor]) -> GradientOf:
        """The same, every piece ``[bags or ids, columns]`` passed through ``change`` once it is averaged."""
        return _Changed(self, change)


class _Changed(GradientOf):
    def __init__(self, gradient_of: GradientOf, change: Callable[[Tensor], Tensor]) -> None:
        self._gradient_of, self._change, self.scale = gradient_of, change, 1.0

    def __call__(self, arrival: Arrival) -> Tensor:
        return self._change(self._gradient_of(arrival))

    def unscaled(self, arrivals: tuple[Arrival, ...]) -> list[Tensor]:
        return [self(arrival) for arrival in arrivals]


@frozen(eq=False)
class PartConfig:
    """What a part is built from.

    Args:
        collection: all tables and outputs of the module.
        members: the indices of this part's tables.
        shardings: how each table is sharded, by name; of this part's tables, with the blocks that it serves, which
            are all unless a layout has several dataflows.
        env: the ranks.
        device: where the local blocks live.
        is_weighted: ids carry weights.
    """

    collection: Collection
    members: Sequence[int]
    shardings: Mapping[str, ParameterSharding]
    env: ShardingEnv
    device: torch.device
    is_weighted: bool


@frozen
class Peer:
    """What another rank said in its header: its batch size, and the fields its part wrote for this rank's."""

    batch_size: int
    fields: Sequence[int]


class PartStep(ABC):
    """One batch on its way through a part."""

    @abstractmethod
    def headers(self) -> Sequence[Sequence[int]]:
        """``header_size`` integers for each rank."""

    @abstractmethod
    def send(self, peers: Sequence[Peer]) -> None:
        """Start sending ids, knowing every rank's header."""

    @abstractmethod
    def receive(self) -> Sequence[Tensor]:
        """Wait for ids; returns the tensors that are read from now on."""

    @abstractmethod
    def lookup(self, *, training: bool) -> None:
        """Look ids up, and start sending results."""

    @abstractmethod
    def views(self) -> list[Tensor]:
        """Wait for results: a float32 tensor ``[bags or ids, columns]`` for each of the part's arrivals."""

    @abstractmethod
    def place_of(self, arrival: Arrival) -> Tensor | None:
        """The places of an arrival's ids among its feature's; ``None`` where it is for all, in order."""

    @abstractmethod
    def send_gradients(self, gradient_of: GradientOf) -> None:
        """Start sending gradients."""

    @abstractmethod
    def update(self) -> list[Tensor | None]:
        """Wait for gradients and update, or return the gradients of the part's parameters."""


class Part(ABC):
    """All tables of a module that share a way of moving ids, results and gradients.

    Attributes:
        groups: the local kernel groups.
        lookups: one for each group.
        arrivals: what it brings home, in the order of :meth:`PartStep.views`.
        header_size: how many integers its headers have, on every rank.
    """

    groups: Sequence[Group]
    lookups: Sequence[Lookup]
    arrivals: Sequence[Arrival]
    header_size: int

    @abstractmethod
    def __init__(self, config: PartConfig) -> None:
        """Decide all that does not depend on a batch, and build the local kernels."""

    @abstractmethod
    def route(self, batch: FeatureBatch | None) -> PartStep:
        """Begin with a batch; ``None`` where this rank's is wrong, and only headers will be asked."""

    @abstractmethod
    def anatomy(self) -> Mapping[str, list[str]]:
        """Lines for people, under ``"input"`` and ``"output"``."""


def parameters_of(lookups: Sequence[Lookup]) -> list[torch.nn.Parameter]:
    """The parameters that autograd sees."""
    return [parameter for lookup in lookups for parameter in lookup.parameters()]
