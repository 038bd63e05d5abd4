"""Collectives of the update forms: one gathers pieces, one adds up values, each for all forms together.

Legend: P pieces of all forms, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shardwright.contracts.comm_backend import Communicator, Work
from shardwright.planning.arrays import Ints
from shardwright.runtime.step.segments import total
from shardwright_plugins.dataflows.replicated.forms import UpdateForm
from shardwright_plugins.dataflows.replicated.sizes import ALIGNMENT, padded

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
        self._pieces: list[Tensor] = []
        sizes: list[Ints] = []
        for form in forms:
            self._pieces += form.pieces()
            sizes += [counts * dtype.itemsize for dtype, counts in form.piece_counts()]
        rank, world_size = communicator.rank, communicator.world_size
        # Bytes of each piece of each rank, and words that have room for them, ``[P, W]``.
        num_bytes = np.array(sizes, dtype=np.int64).reshape(-1, world_size)
        words = padded(num_bytes) // ALIGNMENT
        arriving = total(words).tolist()
        self._work: Work | None = None
        if world_size == 1 or not any(arriving):
            return
        message = torch.empty(arriving[rank], dtype=torch.int64, device=device)
        for place, piece in zip(message.split_with_sizes(words[:, rank].tolist()), self._pieces, strict=True):
            place.view(piece.dtype)[: piece.shape[0]] = piece
        # Nothing is sent to oneself.
        others = np.arange(world_size) != rank
        self._rank, self._num_bytes = rank, num_bytes[:, others].tolist()
        self._words = words[:, others].T.reshape(-1).tolist()
        to_each = [arriving[rank]] * world_size
        to_each[rank] = arriving[rank] = 0
        self._received = message.new_empty(sum(arriving))
        self._work = communicator.all_to_all(
            self._received,
            message if world_size == 2 else message.repeat(world_size - 1),
            arriving,
            to_each,
            label="updates of copies",
        )

    def finish(self) -> None:
        """Wait, and give each form the pieces of all ranks."""
        pieces: Sequence[Tensor] = self._pieces
        if self._work is not None:
            self._work.wait()
            arrived, rank, number = self._received.split_with_sizes(self._words), self._rank, len(pieces)
            found = list[Tensor]()
            for place, (own, sizes) in enumerate(zip(pieces, self._num_bytes, strict=True)):
                dtype = own.dtype
                pairs = zip(arrived[place::number], sizes, strict=True)
                others = [piece.view(dtype)[: size // dtype.itemsize] for piece, size in pairs]
                found += [torch.cat([*others[:rank], own, *others[rank:]])]  # its own did not travel
            pieces = found
        for form in self._forms:
            pieces = form.gather(pieces)


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
        self._num_values = num_values = sum(self._sizes)
        if not num_values:
            return
        self._whole = communicator.room(num_values, device)
        for form, own in zip(forms, self._whole.split(self._sizes), strict=True):
            form.write(own)
        self._reads = communicator.world_size == 2 and communicator.reads_in_place(num_values)
        if self._reads:
            splits = [
                0 if rank == communicator.rank else num_values for rank in range(communicator.world_size)
            ]
            self._arrivals = communicator.exchange(self._whole, splits, splits, label=LABEL)
        else:
            self._work = communicator.all_reduce(self._whole, label=LABEL)

    def finish(self) -> None:
        """Wait, and give each form the terms of its sums."""
        if not self._num_values:
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
        if self._num_values and self._reads:
            self._arrivals.release()
