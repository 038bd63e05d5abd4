"""The headers of a batch: what each rank says of its own to every other, in one message of one size.

Legend: W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from attrs import frozen

from shardwright.planning.layouts.blocks import Ints
from shardwright.runtime.step.executor import PeerHeaders
from shardwright.runtime.step.inputs import Status

_STATUSES = {int(status): status for status in Status}
_FIELDS = ("collection", "checksum", "batch_size", "status", "extra_word")


@frozen
class Header:
    """What a rank says of its batch to all ranks alike.

    Args:
        collection: its number, tagged; see :class:`shardwright.runtime.ranks.lockstep.Lockstep`.
        checksum: of the calls that this rank made before.
        batch_size: samples.
        status: whether it goes on.
        extra_word: a number for what the batch brings that is not looked at; 0: not to be compared.
    """

    collection: int
    checksum: int
    batch_size: int
    status: Status
    extra_word: int


@frozen(eq=False)
class Headers:
    """What all ranks said: a number of each rank, ``[W]``, for each field of :class:`Header`.

    Args:
        collection: see there.
        checksum: see there.
        batch_size: see there.
        status: see there.
        extra_word: see there.
        executors: what each rank's executors say to this rank's.
    """

    collection: Sequence[int]
    checksum: Sequence[int]
    batch_size: Sequence[int]
    status: Sequence[Status]
    extra_word: Sequence[int]
    executors: Sequence[PeerHeaders]


@frozen(eq=False)
class HeaderFormat:
    """Headers as rows of integers: the fields of a :class:`Header`, then those of each executor.

    Args:
        executor_sizes: fields of each executor.
    """

    executor_sizes: Sequence[int]

    @property
    def size(self) -> int:
        """Integers of a header."""
        return len(_FIELDS) + sum(self.executor_sizes)

    def pack(self, header: Header, executors: Sequence[Ints], size: int) -> Ints:
        """The rows for all ranks, ``[W, size]``.

        Args:
            header: the same for all.
            executors: what each executor says to each rank, ``[W, fields]``.
            size: at least :attr:`size`; what is left over are zeros.
        """
        rows = np.zeros((len(executors[0]), size), dtype=np.int64)
        rows[:, : len(_FIELDS)] = [getattr(header, name) for name in _FIELDS]
        for own, (start, stop) in zip(executors, self._spans(), strict=True):
            rows[:, start:stop] = own
        return rows

    def unpack(self, rows: Ints) -> Headers:
        """What all ranks said, ``[W, size]``."""
        fixed = dict(zip(_FIELDS, rows[:, : len(_FIELDS)].T.tolist(), strict=True))
        sizes = rows[:, _FIELDS.index("batch_size")].copy()
        return Headers(
            **{**fixed, "status": [_STATUSES[status] for status in fixed["status"]]},
            executors=[PeerHeaders(sizes, rows[:, start:stop]) for start, stop in self._spans()],
        )

    def _spans(self) -> list[tuple[int, int]]:
        """Where each executor's fields begin and end."""
        return list(pairwise(accumulate(self.executor_sizes, initial=len(_FIELDS))))
