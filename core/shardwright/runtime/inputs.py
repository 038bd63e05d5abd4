"""Checking a batch before it is routed, so that bad input on one rank is an error on all, in the same step.

A problem is four integers, which fit into the header every rank sends to every other.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from attrs import frozen
from torch import Tensor

from shardwright.errors import InvalidInputError
from shardwright.runtime.collection import Collection, FeatureBatch
from shardwright.sparse import KeyedJaggedTensor


class Status(IntEnum):
    """What a rank says of its batch in the header's status word."""

    FINE = 0
    MISSING_FEATURE = 1
    MISSING_WEIGHTS = 2
    ID_OUT_OF_RANGE = 3
    FAILED = 4
    WEIGHTS_REQUIRE_GRAD = 5
    NO_BATCH = 6  # its data has ended, and it takes no further part
    EMPTY_BATCH = 7  # its data has ended, and it goes on with empty batches
    STOPPED = 8  # the step before this batch's failed there

    @property
    def is_complaint(self) -> bool:
        """Whether it says that a batch is wrong."""
        return self not in (Status.FINE, Status.NO_BATCH, Status.EMPTY_BATCH, Status.STOPPED)


def goes_on(statuses: Sequence[Status]) -> bool:
    """Whether the batches of which the ranks say this are trained on, or complained about."""
    if any(status in (Status.NO_BATCH, Status.STOPPED) for status in statuses):
        return False
    return any(status is not Status.EMPTY_BATCH for status in statuses)


@frozen
class Problem:
    """A rank's problem with its batch: feature index, offending value and its position, where they apply."""

    status: Status
    feature: int = 0
    value: int = 0
    position: int = 0

    def message(self, collection: Collection, rank: int) -> str:
        """The text every rank raises."""
        if self.status is Status.FAILED:
            return f"rank {rank} could not route its batch; its own error says why"
        name = collection.features[self.feature]
        table = collection.smallest_table(self.feature)
        where = f"rank {rank}: feature {name!r} of table {table.describe()}"
        if self.status is Status.MISSING_FEATURE:
            return f"{where} is missing from the KeyedJaggedTensor"
        if self.status is Status.MISSING_WEIGHTS:
            return f"{where}: the collection is weighted but the KeyedJaggedTensor has no weights"
        if self.status is Status.WEIGHTS_REQUIRE_GRAD:
            return f"{where}: the weights of ids require gradients, which do not travel back to them: detach() them"
        return (
            f"{where} has the id {self.value} at position {self.position} of its values; "
            f"ids must be 0 <= id < {table.num_embeddings}: hash or clamp them before the lookup"
        )


class BatchProblem(InvalidInputError):
    """A batch that cannot be routed on this rank; becomes the status word."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.status.name)
        self.problem = problem


class BatchReader:
    """Takes the collection's features out of a batch and checks them.

    Args:
        collection: what is looked up.
        is_weighted: ids must carry weights.
    """

    def __init__(self, collection: Collection, *, is_weighted: bool) -> None:
        self._features, self._is_weighted = collection.features, is_weighted
        self._num_rows = [
            collection.smallest_table(feature).num_embeddings for feature in range(len(collection.features))
        ]

    def read(self, features: KeyedJaggedTensor) -> FeatureBatch:
        """The features in the collection's order.

        Raises:
            BatchProblem: a feature or weights are missing, or an id is out of range.
        """
        if not isinstance(features, KeyedJaggedTensor):
            raise InvalidInputError(
                f"a sharded collection takes a KeyedJaggedTensor, got {type(features).__name__}"
            )
        positions = self._positions(features)
        bounds = features.offset_per_key()
        spans = [(bounds[position], bounds[position + 1]) for position in positions]
        values = _in_a_row(features.values().to(torch.int64))  # its bytes are sent
        ids = [values[start:stop] for start, stop in spans]
        self._check_ids(ids)
        lengths = features.lengths().to(torch.int32).view(len(bounds) - 1, features.stride())
        if positions != list(range(lengths.shape[0])):
            lengths = lengths[positions]
        weights = None
        if self._is_weighted:
            all_weights = _in_a_row(features.weights().detach().to(torch.float32))
            weights = [all_weights[start:stop] for start, stop in spans]
        return FeatureBatch(lengths, ids, weights)

    def _positions(self, features: KeyedJaggedTensor) -> list[int]:
        """Where each feature of the collection stands among the batch's keys."""
        place = {key: index for index, key in enumerate(features.keys())}
        for index, name in enumerate(self._features):
            if name not in place:
                raise BatchProblem(Problem(Status.MISSING_FEATURE, index))
        if self._is_weighted and features.weights_or_none() is None:
            raise BatchProblem(Problem(Status.MISSING_WEIGHTS))
        if self._is_weighted and features.weights().requires_grad and torch.is_grad_enabled():
            raise BatchProblem(Problem(Status.WEIGHTS_REQUIRE_GRAD))
        return [place[name] for name in self._features]

    def _check_ids(self, ids: Sequence[Tensor]) -> None:
        for index, (values, num_rows) in enumerate(zip(ids, self._num_rows, strict=True)):
            if values.numel() == 0:
                continue
            low, high = torch.aminmax(values)
            if int(low) < 0 or int(high) >= num_rows:
                position = int(((values < 0) | (values >= num_rows)).nonzero()[0, 0])
                raise BatchProblem(Problem(Status.ID_OUT_OF_RANGE, index, int(values[position]), position))


def _in_a_row(tensor: Tensor) -> Tensor:
    """The values one after the other, as they must be to be viewed as bytes."""
    # An empty tensor may have a stride of 0 (numpy makes such), which torch calls contiguous but does not view.
    return tensor.contiguous() if tensor.numel() else tensor.new_empty(tensor.shape)
