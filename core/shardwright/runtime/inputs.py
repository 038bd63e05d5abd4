"""Checking a batch before it is routed, so that bad input on one rank is an error on all, in the same step.

A problem is four integers, which fit into the header every rank sends to every other (DESIGN, section 7).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from attrs import frozen
from torch import Tensor

from shardwright.errors import InvalidInputError
from shardwright.planning.tables import TableSpec
from shardwright.runtime.exchange_plan import ExchangePlan
from shardwright.sparse import KeyedJaggedTensor


class Status(IntEnum):
    """What a rank says of its batch in the header's status word."""

    FINE = 0
    MISSING_FEATURE = 1
    MISSING_WEIGHTS = 2
    ID_OUT_OF_RANGE = 3
    FAILED = 4


@frozen
class Problem:
    """A rank's problem with its batch: feature index, offending value and its position, where they apply."""

    status: Status
    feature: int = 0
    value: int = 0
    position: int = 0

    def message(self, plan: ExchangePlan, rank: int) -> str:
        """The text every rank raises."""
        if self.status is Status.FAILED:
            return f"rank {rank} could not route its batch; its own error says why"
        name = plan.features[self.feature]
        table = _smallest_table(plan, self.feature)
        where = f"rank {rank}: feature {name!r} of table {table.describe()}"
        if self.status is Status.MISSING_FEATURE:
            return f"{where} is missing from the KeyedJaggedTensor"
        if self.status is Status.MISSING_WEIGHTS:
            return f"{where}: the collection is weighted but the KeyedJaggedTensor has no weights"
        return (
            f"{where} has the id {self.value} at position {self.position} of its values; "
            f"ids must be 0 <= id < {table.num_embeddings}: hash or clamp them before the lookup"
        )


def _smallest_table(plan: ExchangePlan, feature: int) -> TableSpec:
    tables = [plan.tables[output.table] for output in plan.outputs if output.feature == feature]
    return min(tables, key=lambda table: table.num_embeddings)


class BatchProblem(InvalidInputError):
    """A batch that cannot be routed on this rank; becomes the status word."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.status.name)
        self.problem = problem


class BatchCheck:
    """Checks that a batch has what the collection looks up; knows the least number of rows for each feature."""

    def __init__(self, plan: ExchangePlan, *, is_weighted: bool) -> None:
        self._features, self._is_weighted = plan.features, is_weighted
        self._num_rows = [
            _smallest_table(plan, feature).num_embeddings for feature in range(len(plan.features))
        ]

    def positions(self, features: KeyedJaggedTensor) -> list[int]:
        """Where each feature of the collection stands among the batch's keys.

        Raises:
            BatchProblem: a feature or the weights are missing.
        """
        place = {key: index for index, key in enumerate(features.keys())}
        for index, name in enumerate(self._features):
            if name not in place:
                raise BatchProblem(Problem(Status.MISSING_FEATURE, index))
        if self._is_weighted and features.weights_or_none() is None:
            raise BatchProblem(Problem(Status.MISSING_WEIGHTS))
        return [place[name] for name in self._features]

    def check_ids(self, ids: Sequence[Tensor]) -> None:
        """Check the ids of each feature against its tables' rows.

        Raises:
            BatchProblem: the first id out of range.
        """
        for index, (values, num_rows) in enumerate(zip(ids, self._num_rows, strict=True)):
            if values.numel() == 0:
                continue
            low, high = torch.aminmax(values)
            if int(low) < 0 or int(high) >= num_rows:
                position = int(((values < 0) | (values >= num_rows)).nonzero()[0, 0])
                raise BatchProblem(Problem(Status.ID_OUT_OF_RANGE, index, int(values[position]), position))
