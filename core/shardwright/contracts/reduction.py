"""The sum of values over ranks by two exchanges, for comm backends that have no better one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class Reduction:
    """A sum under way: each rank adds up a slice, in rank order, and all exchange the slices' sums.

    Args:
        exchange: the communicator's ``exchange``.
        rank: its rank.
        world_size: its number of ranks.
        values: the terms of this rank, and then the sums.
        mean: divide by the number of ranks.
        label: name of what is added up.
    """

    def __init__(
        self,
        exchange: Callable[..., Any],
        rank: int,
        world_size: int,
        values: Tensor,
        *,
        mean: bool,
        label: str,
    ) -> None:
        self._exchange, self._rank, self._mean, self._label = exchange, rank, mean, label
        self._slices, self._is_done = values.tensor_split(world_size), False
        sizes = [_sent([own]).numel() for own in self._slices]
        self._out = self._but_own(sizes)
        self._back = self._but_own([sizes[rank]] * len(sizes))
        others = [own for other, own in enumerate(self._slices) if other != rank]
        if others:
            self._terms = exchange(_sent(others), self._back, self._out, label=label)

    def _but_own(self, sizes: Sequence[int]) -> list[int]:
        return [0 if rank == self._rank else size for rank, size in enumerate(sizes)]

    def wait(self) -> None:
        """Add up this rank's slice, and take the sums of the others."""
        import torch

        own, others = self._slices[self._rank], len(self._slices) - 1
        if self._is_done or not others:
            return
        terms = [term.view(own.dtype) for term in self._terms.wait()]
        terms[self._rank] = own
        total = terms[0].to(torch.promote_types(own.dtype, torch.float32), copy=True)
        for term in terms[1:]:
            total += term
        own.copy_(total.div_(len(terms)) if self._mean else total)
        self._terms.release()
        sums = self._exchange(_sent([own] * others), self._out, self._back, label=f"sums of {self._label}")
        for rank, arrived in enumerate(sums.wait()):
            if rank != self._rank:
                self._slices[rank].copy_(arrived.view(own.dtype))
        sums.release()
        self._is_done = True


def _sent(pieces: Sequence[Tensor]) -> Tensor:
    """Pieces as they travel: of bytes, since not all backends send all dtypes."""
    import torch

    whole = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
    return whole if whole.dtype == torch.float32 else whole.view(torch.uint8)
