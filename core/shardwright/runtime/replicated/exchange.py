"""Collectives of the update forms: one gathers pieces, one adds up values, each for all forms together.

Legend: W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shardwright.contracts.comm_backend import Work
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.replicated.forms import UpdateForm
from shardwright.runtime.step.buffers import ALIGNMENT, joined
from shardwright.runtime.step.segments import deal


class Gathering:
    """A gathering of every rank's pieces on every rank: one collective, or none if there are no pieces.

    Args:
        env: the ranks.
        forms: forms whose pieces are gathered.
        device: device of all tensors.
    """

    def __init__(self, env: ShardingEnv, forms: Sequence[UpdateForm], device: torch.device) -> None:
        self._env, self._forms = env, forms
        self._work: Work | None = None
        self._pieces = [piece.view(torch.int64) for form in forms for piece in form.pieces()]
        sizes = [size // ALIGNMENT for form in forms for size in form.piece_bytes()]
        self._sizes = np.stack([np.zeros(env.world_size, dtype=np.int64), *sizes])[1:]
        self._others = self._sizes.copy()
        self._others[:, env.rank] = 0  # nothing is sent to oneself
        others = env.world_size - 1
        if not others or not self._sizes.any():
            return
        own = torch.cat([torch.empty(0, dtype=torch.int64, device=device), *self._pieces])
        to_each = [0 if rank == env.rank else len(own) for rank in range(env.world_size)]
        arriving = self._others.sum(0).tolist()
        self._received = own.new_empty(sum(arriving))
        self._work = env.communicator.all_to_all(
            self._received,
            own if others == 1 else own.repeat(others),
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
            before = self._sizes[:, : self._env.rank].sum(1).tolist()
            arrived = zip(deal(self._received, self._others), self._pieces, before, strict=True)
            pieces = [torch.cat([others[:place], own, others[place:]]) for others, own, place in arrived]
        for form in self._forms:
            count = len(form.piece_bytes())
            form.gather(pieces[:count])
            pieces = pieces[count:]


class Summing:
    """The sums of all forms' values over the ranks.

    As in a ring all-reduce, each rank sums a slice, and then all exchange the slices' sums. Each rank so receives
    ``2 (W - 1) / W`` times the values. If ranks can read each other's memory, reading all other ranks' values takes
    ``W - 1`` times the values. If that is no more, they read them, and the terms are added up in the update itself.

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
        if env.world_size == 1:
            return
        is_no_more = env.world_size - 1 <= 2 * (env.world_size - 1) / env.world_size
        self._reads = is_no_more and env.communicator.reads_in_place(total)
        self._slices = self._cut()
        others = self._but_own(self._slices)
        mine = self._slices[env.rank].numel()
        self._out = [0 if rank == env.rank else own.numel() for rank, own in enumerate(self._slices)]
        self._back = [0 if rank == env.rank else mine for rank in range(env.world_size)]
        self._arrivals = env.communicator.exchange(
            joined(others), self._back, self._out, label="dense gradients"
        )

    def _cut(self) -> list[Tensor]:
        """The part of the values that each rank sums: all of them if ranks read in place, else a slice."""
        world_size = self._env.world_size
        if self._reads:
            return [self._whole] * world_size
        first, rest = divmod(self._whole.numel(), world_size)
        return list(self._whole.split([first + (rank < rest) for rank in range(world_size)]))

    def _but_own(self, by_rank: Sequence[Tensor]) -> list[Tensor]:
        return [piece for rank, piece in enumerate(by_rank) if rank != self._env.rank]

    def finish(self) -> None:
        """Wait, and give each form the terms of its sums."""
        if not sum(self._sizes):
            return
        terms = [self._whole]
        if self._env.world_size > 1:
            by_rank = list(self._arrivals.wait())
            if self._reads:
                by_rank[self._env.rank] = self._whole
                terms = by_rank
            else:
                self._add(self._but_own(by_rank))
        pieces = zip(*(term.split(self._sizes) for term in terms), strict=True)
        for form, own in zip(self._forms, pieces, strict=True):
            form.take_sum(own)

    def release(self) -> None:
        """Allow other ranks to reuse the memory of the terms."""
        if sum(self._sizes) and self._env.world_size > 1 and self._reads:
            self._arrivals.release()

    def _add(self, partial: Sequence[Tensor]) -> None:
        """Sum this rank's slice, and exchange the slices, so that all ranks have the same bits."""
        mine, others = self._slices[self._env.rank], self._but_own(self._slices)
        for other in partial:
            mine += other
        self._arrivals.release()
        sums = self._env.communicator.exchange(
            joined([mine] * len(others)), self._out, self._back, label="dense sums"
        )
        for piece, values in zip(others, self._but_own(sums.wait()), strict=True):
            piece.copy_(values)
        sums.release()
