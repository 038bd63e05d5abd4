"""Collectives of the update forms: one gathers pieces, one adds up values, each for all forms together.

Legend: W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shardwright.contracts.comm_backend import Work
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.step.segments import deal, total
from shardwright_plugins.dataflows.replicated.buffers import ALIGNMENT
from shardwright_plugins.dataflows.replicated.forms import UpdateForm

LABEL = "dense gradients"


class Gathering:
    """A gathering of every rank's pieces on every rank: one collective, or none if there are no pieces.

    Args:
        env: the ranks.
        forms: forms whose pieces are gathered.
        device: device of all tensors.
    """

    def __init__(self, env: ShardingEnv, forms: Sequence[UpdateForm], device: torch.device) -> None:
        self._forms, self._rank = forms, env.rank
        self._work: Work | None = None
        self._pieces = [piece.view(torch.int64) for form in forms for piece in form.pieces()]
        sizes = [form.piece_bytes() for form in forms]
        self._counts = [len(own) for own in sizes]
        if not self._pieces or env.world_size == 1:
            return
        # Elements of each piece of each rank, ``[pieces, W]``; nothing is sent to oneself.
        self._sizes = np.array([size for own in sizes for size in own]) // ALIGNMENT
        self._others = self._sizes.copy()
        self._others[:, self._rank] = 0
        if not self._sizes.any():
            return
        own = torch.cat([torch.empty(0, dtype=torch.int64, device=device), *self._pieces])
        to_each = [own.numel()] * env.world_size
        to_each[self._rank] = 0
        arriving = total(self._others).tolist()
        self._received = own.new_empty(sum(arriving))
        self._work = env.communicator.all_to_all(
            self._received,
            own if env.world_size == 2 else own.repeat(env.world_size - 1),
            arriving,
            to_each,
            label="updates of copies",
        )

    def finish(self) -> None:
        """Wait, and give each form the pieces of all ranks."""
        pieces = self._pieces
        if self._work is not None:
            self._work.wait()
            # Own pieces did not travel: put them between those of lower and of higher ranks.
            before = total(self._sizes[:, : self._rank], axis=1).tolist()
            arrived = zip(deal(self._received, self._others), self._pieces, before, strict=True)
            pieces = [torch.cat([others[:place], own, others[place:]]) for others, own, place in arrived]
        for form, count in zip(self._forms, self._counts, strict=True):
            form.gather(pieces[:count])
            pieces = pieces[count:]


class Summing:
    """The sums of all forms' values over the ranks.

    Two ranks that can read each other's memory do so, and the terms are added up in the update itself. Otherwise it is
    an all-reduce.

    Args:
        env: the ranks.
        forms: forms whose values are summed.
        device: device of all tensors.
    """

    def __init__(self, env: ShardingEnv, forms: Sequence[UpdateForm], device: torch.device) -> None:
        self._env, self._forms = env, forms
        self._sizes = [form.num_values for form in forms]
        total = sum(self._sizes)
        if not total:
            return
        self._whole = env.communicator.room(total, device)
        for form, own in zip(forms, self._whole.split(self._sizes), strict=True):
            form.write(own)
        self._reads = env.world_size == 2 and env.communicator.reads_in_place(total)
        if self._reads:
            splits = [0 if rank == env.rank else total for rank in range(env.world_size)]
            self._arrivals = env.communicator.exchange(self._whole, splits, splits, label=LABEL)
        else:
            self._work = env.communicator.all_reduce(self._whole, label=LABEL)

    def finish(self) -> None:
        """Wait, and give each form the terms of its sums."""
        if not sum(self._sizes):
            return
        terms = [self._whole]
        if self._reads:
            terms = list(self._arrivals.wait())
            terms[self._env.rank] = self._whole
        else:
            self._work.wait()
        pieces = zip(*(term.split(self._sizes) for term in terms), strict=True)
        for form, own in zip(self._forms, pieces, strict=True):
            form.take_sum(own)

    def release(self) -> None:
        """Allow other ranks to reuse the memory of the terms."""
        if sum(self._sizes) and self._reads:
            self._arrivals.release()
