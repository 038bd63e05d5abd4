"""Examples as arrays, and what every source of them gives: tables, batches to train on, batches held out.

Shapes: B examples, D dense features, T tables (one feature each), N ids in all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["NUM_CATEGORICAL", "NUM_DENSE", "Examples", "Source", "Table", "share"]

NUM_DENSE = 13
NUM_CATEGORICAL = 26


@attrs.frozen
class Table:
    """One categorical feature and the embedding table of its own that it looks up."""

    feature: str
    num_rows: int
    mean_bag_size: float = 1.0

    @property
    def name(self) -> str:
        """Name of the table in the module and in the plan."""
        return f"t_{self.feature}"


@attrs.frozen(eq=False)
class Examples:
    """Some examples, categorical features one after the other.

    Attributes:
        dense: [B, D] float32.
        lengths: [T, B] int32, how many ids each bag has.
        ids: [N] int64, bag after bag in the order of `lengths`.
        labels: [B] float32, 0 or 1.
        true_logits: [B] float64, where the model that drew the labels is known.
    """

    dense: NDArray[np.float32]
    lengths: NDArray[np.int32]
    ids: NDArray[np.int64]
    labels: NDArray[np.float32]
    true_logits: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.labels)


class Source(ABC):
    """Source of examples.

    A global batch is the same whatever the number of ranks: each rank asks for its share of it. So all ranks
    come to the end at the same step.
    """

    tables: tuple[Table, ...]

    @abstractmethod
    def training_batches(self, rank: int, world_size: int) -> Iterator[Examples]:
        """This rank's shares of the global batches, one a step."""

    @abstractmethod
    def held_out_batches(self, rank: int, world_size: int) -> Iterator[Examples]:
        """This rank's shares of the examples that are never trained on. All ranks get as many batches."""

    @property
    def num_bad_lines(self) -> int:
        """Number of malformed lines left out so far."""
        return 0


def share(count: int, rank: int, world_size: int) -> range:
    """The part of `count` examples in a row that falls to a rank: parts differ by one at most.

    Example:
        >>> [share(7, rank, 2) for rank in range(2)]
        [range(0, 3), range(3, 7)]
    """
    return range(count * rank // world_size, count * (rank + 1) // world_size)
