"""Events of training steps: what a plugin is told that watches loops, or takes their times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attrs import frozen


@frozen(eq=False)
class TrainedCollection:
    """A sharded collection, as listeners know it: the same object in all of its events.

    Args:
        updated_in_backward: description of a table that is updated in each backward pass; empty if none is.
        adds_up: two updates from one forward pass equal one by the sum of their gradients.
        updated_in_step: descriptions of the tables that are updated in the optimizer's step.
        has_gradients: function that tells if gradients are kept for that now.
    """

    updated_in_backward: str
    adds_up: bool
    updated_in_step: Sequence[str]
    has_gradients: Callable[[], bool]


class StepListener:
    """Something that is told of training steps: what an extension at the point ``step`` makes.

    Every method does nothing by default. It is called on each rank, between two lines of the user's loop, and what it
    raises comes out there. Other ranks may be elsewhere: no method may wait for them.
    """

    def has_model(self, model: Any, collections: Sequence[TrainedCollection]) -> None:
        """Hear that a ``DistributedModelParallel`` was made."""

    def has_dense_part(self, wrapper: Any, module: Any, parameters: Sequence[Any]) -> None:
        """Hear that a ``DistributedDataParallel`` takes in a module with sharded tables.

        Args:
            wrapper: the ``DistributedDataParallel``, whose parameters are not averaged yet.
            module: module that it takes in.
            parameters: parameters whose gradients it averages.
        """

    def updates(self, collection: TrainedCollection, forward: Any) -> None:
        """Hear that gradients have come in a backward pass, and that the tables take them now.

        Args:
            collection: the collection.
            forward: the forward pass whose gradients they are; an object that can be referred to weakly.
        """

    def steps(self, collection: TrainedCollection) -> None:
        """Hear that the optimizer of the tables begins its step, before it applies what is kept."""

    def drops(self, collection: TrainedCollection) -> None:
        """Hear that gradients are set to zero by the optimizer of the tables."""
