"""The headers of a batch: one message of fixed size from every rank to every other, about its own batch.

Legend: W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from attrs import frozen

from shardwright.planning.layouts.blocks import Ints
from shardwright.runtime.step.batches.inputs import Status
from shardwright.runtime.step.executor import PeerHeaders

_STATUSES = {int(status): status for status in Status}
_FIELDS = ("calls", "batch_size", "status", "extra_word", "trains_weights")
"""Fields that a rank sends to all ranks alike."""


@frozen(eq=False)
class Headers:
    """The headers of all ranks: for each field the values of all ranks, ``[W]``.

    Args:
        calls: checksum of the calls that each rank made; see :class:`shardwright.runtime.ranks.lockstep.Lockstep`.
        batch_size: samples of each rank's batch.
        status: status word of each rank.
        extra_word: checksum of the keys and weights that no table uses in each rank's batch; 0: not to be compared.
        trains_weights: 1 for each rank whose ids' weights require gradients.
        executors: headers for each of this rank's executors.
    """

    calls: Sequence[int]
    batch_size: Sequence[int]
    status: Sequence[Status]
    extra_word: Sequence[int]
    trains_weights: Sequence[int]
    executors: Sequence[PeerHeaders]


@frozen(eq=False)
class HeaderFormat:
    """Headers as rows of integers: the fields that all ranks get, then those of each executor.

    Args:
        executor_sizes: number of fields of each executor.
    """

    executor_sizes: Sequence[int]

    @property
    def size(self) -> int:
        """Number of integers in a header."""
        return len(_FIELDS) + sum(self.executor_sizes)

    def pack(self, fields: Sequence[int], executors: Sequence[Ints], size: int) -> Ints:
        """Write the headers for all ranks as rows, ``[W, size]``.

        Args:
            fields: fields that are the same for all ranks, in the order of :class:`Headers`.
            executors: each executor's fields for each rank, ``[W, fields]``.
            size: length of a row, at least :attr:`size`; unused places are zeros.
        """
        rows = np.zeros((len(executors[0]), size), dtype=np.int64)
        rows[:, : len(_FIELDS)] = fields
        for own, (start, stop) in zip(executors, self._spans(), strict=True):
            rows[:, start:stop] = own
        return rows

    def unpack(self, rows: Ints) -> Headers:
        """Read the headers from the rows of all ranks, ``[W, size]``."""
        fixed = dict(zip(_FIELDS, rows[:, : len(_FIELDS)].T.tolist(), strict=True))
        sizes = rows[:, _FIELDS.index("batch_size")].copy()
        return Headers(
            **{**fixed, "status": [_STATUSES[status] for status in fixed["status"]]},
            executors=[PeerHeaders(sizes, rows[:, start:stop]) for start, stop in self._spans()],
        )

    def _spans(self) -> list[tuple[int, int]]:
        """First place of each executor's fields in a row, and the place after its last."""
        return list(pairwise(accumulate(self.executor_sizes, initial=len(_FIELDS))))
