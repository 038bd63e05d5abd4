"""Collectives of the update forms: one gathers pieces, one adds up values, each for all forms together.

Legend: P pieces of all forms, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shardwright.contracts.comm_backend import Communicator, Work
from shardwright.runtime.step.segments import places_of, starts_of, take, total
from shardwright_plugins.dataflows.replicated.buffers import ALIGNMENT, padded
from shardwright_plugins.dataflows.replicated.forms import UpdateForm

LABEL = "dense gradients"


class Gathering:
    """A gathering of every rank's pieces on every rank: one collective, or none if there are no pieces.

    A rank's message has its pieces in turn, each from the beginning of a word.

    Args:
        communicator: communicator of the ranks.
        forms: forms whose pieces are gathered.
        device: device of all tensors.
    """

    def __init__(self, communicator: Communicator, forms: Sequence[UpdateForm], device: torch.device) -> None:
        self._forms = forms
        self._work: Work | None = None
        pieces = [piece for form in forms for piece in form.pieces()]
        self._counts = [form.piece_counts() for form in forms]
        num_bytes = [count * dtype.itemsize for own in self._counts for dtype, count in own]
        # Words of each piece of each rank, ``[P, W]``.
        words = padded(np.array(num_bytes, dtype=np.int64).reshape(-1, communicator.world_size)) // ALIGNMENT
        self._starts = places_of(words)
        to_each, rank = total(words).tolist(), communicator.rank
        message = torch.empty(to_each[rank], dtype=torch.int64, device=device)
        for piece, start in zip(pieces, starts_of(words[:, rank]).tolist(), strict=True):
            place = start * (ALIGNMENT // piece.dtype.itemsize)
            message.view(piece.dtype)[place : place + piece.numel()] = piece.reshape(-1)
        self._received = message
        if communicator.world_size > 1 and any(to_each):
            self._received = message.new_empty(sum(to_each))
            self._work = communicator.all_to_all(
                self._received,
                message.repeat(communicator.world_size),
                to_each,
                [to_each[rank]] * communicator.world_size,
                label="updates of copies",
            )

    def finish(self) -> None:
        """Wait, and give each form the pieces of all ranks."""
        if self._work is not None:
            self._work.wait()
        starts = iter(self._starts)
        for form, counts in zip(self._forms, self._counts, strict=True):
            form.gather(
                [
                    take(self._received.view(dtype), next(starts) * (ALIGNMENT // dtype.itemsize), count)
                    for dtype, count in counts
                ]
            )


class Summing:
    """The sums of all forms' values over the ranks.

    Two ranks that can read each other's memory do so, and the terms are added up in the update itself. Otherwise it is
    an all-reduce.

    Args:
        communicator: communicator of the ranks.
        forms: forms whose values are summed.
        device: device of all tensors.
    """

    def __init__(self, communicator: Communicator, forms: Sequence[UpdateForm], device: torch.device) -> None:
        self._rank, self._forms = communicator.rank, forms
        self._sizes = [form.num_values for form in forms]
        total = sum(self._sizes)
        if not total:
            return
        self._whole = communicator.room(total, device)
        for form, own in zip(forms, self._whole.split(self._sizes), strict=True):
            form.write(own)
        self._reads = communicator.world_size == 2 and communicator.reads_in_place(total)
        if self._reads:
            splits = [0 if rank == communicator.rank else total for rank in range(communicator.world_size)]
            self._arrivals = communicator.exchange(self._whole, splits, splits, label=LABEL)
        else:
            self._work = communicator.all_reduce(self._whole, label=LABEL)

    def finish(self) -> None:
        """Wait, and give each form the terms of its sums."""
        if not sum(self._sizes):
            return
        terms = [self._whole]
        if self._reads:
            terms = list(self._arrivals.wait())
            terms[self._rank] = self._whole
        else:
            self._work.wait()
        pieces = zip(*(term.split(self._sizes) for term in terms), strict=True)
        for form, own in zip(self._forms, pieces, strict=True):
            form.take_sum(own)

    def release(self) -> None:
        """Allow other ranks to reuse the memory of the terms."""
        if sum(self._sizes) and self._reads:
            self._arrivals.release()
