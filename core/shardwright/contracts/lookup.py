"""The contract of a built kernel: bags in, sums out; gradients in, updates done.

Legend: S slots, W source ranks, B_w batch size of source w, B = sum of B_w, N ids, D columns of a block, R its rows.
A slot is one feature looked up in one local block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from shardwright.contracts.kernel_request import KernelRequest
from shardwright.planning.layouts.layout import Block
from shardwright.planning.tables.spec import TableSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@frozen
class BlockSpec:
    """A local block of a table.

    Args:
        table: the table's specification.
        block: its rows and columns.
        request: request that the kernel is built for.
        num_slots: number of features that are looked up in it; their slots follow one another.
    """

    table: TableSpec
    block: Block
    request: KernelRequest
    num_slots: int


@frozen(eq=False)
class Bags:
    """The bags of one lookup, in the order they arrived: by source rank, slot, bag.

    Args:
        ids: ``[N]`` int64, local rows of the slot's block, or keys where the kernel declares ``row_state``.
        lengths: ``[bags]`` int32, ids of each bag; ``None`` where every id is a bag of its own (sequences).
        weights: ``[N]`` float32, or ``None``.
        table: number of bags of each slot, for each source, ``[W, S]``; ``counts=`` tuples, or an array of NumPy's. In
            pooled lookups ``B_w`` for all slots, unless the bags are ragged.
        is_ragged: slots have bags of their own number, since bags without ids were left out; only for kernels that
            declare ``takes_ragged_bags``.
        columns: further columns of the ids that the compute kernels of the collection ask for
            (``ComputeKernel.columns``), by name, ``[N]`` each.
    """

    ids: Tensor
    lengths: Tensor | None
    weights: Tensor | None
    table: npt.NDArray[np.int64] = field(
        alias="counts",
        converter=partial(np.asarray, dtype=np.int64),  # type: ignore[misc]  # mypy's plugin knows functions only
    )
    is_ragged: bool = False
    columns: Mapping[str, Tensor] = field(factory=dict)

    @property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """Number of bags of each slot, for each source."""
        return tuple(map(tuple, self.table.tolist()))

    @property
    def tensors(self) -> list[Tensor]:
        """The ids, lengths, weights and further columns, as far as they are there."""
        every = (self.ids, self.lengths, self.weights, *self.columns.values())
        return [tensor for tensor in every if tensor is not None]

    @property
    def num_sources(self) -> int:
        """``W``."""
        return len(self.table)

    @property
    def num_slots(self) -> int:
        """``S``."""
        return int(self.table.shape[1])

    @property
    def num_bags(self) -> int:
        """Bags of all sources and slots."""
        return self.ids.numel() if self.lengths is None else self.lengths.numel()

    @property
    def flat_counts(self) -> list[int]:
        """The bags of each (source, slot), in order."""
        flat: list[int] = self.table.reshape(-1).tolist()
        return flat

    def per_id(self, per_bag: Tensor) -> Tensor:
        """A value of each bag ``[bags]``, repeated for each of its ids: ``[N]``."""
        if self.lengths is None:
            return per_bag
        return per_bag.repeat_interleave(self.lengths, output_size=self.ids.numel())


class RowIndex(ABC):
    """The rows of one block of a table whose ids are keys, any 64-bit numbers.

    It gives rows to keys, up to the block's number of rows, and may take them away again. It holds no weights: what
    holds them looks rows up and updates them, as it does where ids are rows. Tensors are on the block's device, but for
    what :meth:`load` is given and returns.

    Attributes:
        num_evicted: number of rows that were taken from their keys so far. A row that was found is still its key's
            while this number stays.
    """

    num_evicted: int = 0

    @abstractmethod
    def resolve(
        self, keys: Tensor, *, training: bool, columns: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Find the rows of keys; in training, first give rows to new ones.

        A key that gets no row in training was refused: it was not seen often enough, or no row is free and none may be
        evicted. A row of a key of this call must not be evicted. Without training nothing changes.

        Args:
            keys: ``[N]`` int64, any number of times each.
            training: a step trains with these keys.
            columns: columns of the keys that the kernel asks for (``ComputeKernel.columns``), ``[N]`` each; only an
                index of a kernel that asks is given the argument.

        Returns:
            The row of each key, or -1 for one that has none: ``[N]`` int64; and the rows that this call gave to new
            keys, each once: ``[B]`` int64.
        """

    @abstractmethod
    def rows_in_use(self) -> Tensor:
        """Return the rows that have a key, rising: ``[U]`` int64."""

    @abstractmethod
    def state(self) -> Mapping[str, Tensor]:
        """Return what it knows of each row, for checkpoints and resharding.

        Returns:
            int64 ``[R, 1]`` each, under the names in the kernel's ``row_state``: first the key of each row. The keys
            that were born and evicted since a mark are the difference from a copy made then.
        """

    @abstractmethod
    def load(self, state: Mapping[str, Tensor]) -> Tensor:
        """Forget all keys, and take over those of other blocks.

        Args:
            state: rows of :meth:`state` of blocks under any plan, ``[M, 1]`` each, whose keys belong to this block;
                rows without a key may be among them.

        Returns:
            For each row of this block, which of the ``M`` it is, or -1: ``[R]`` int64, on the device of ``state``. With
            more keys than rows, it chooses which have a row.
        """


def _plain_room(num_elements: int) -> Tensor:
    import torch

    return torch.empty(num_elements, dtype=torch.float32, device="cpu")


class Lookup(ABC):
    """The blocks of one kernel group on one rank: weights, optimizer state, lookup and update.

    The result of :meth:`forward` holds one sum per bag, flat in memory, sources one after the other. Inside a
    source the order is slot after slot, ``[bags, D]`` each, or, in pooled lookups of a kernel that declares
    ``batch_major``, ``[B_w, sum of D]``; of ragged bags it is slot after slot always. Gradients come back in the same
    order, with as many columns as the kernel asked for (``needs_whole_rows``).

    Autograd is the engine's business: ``forward`` runs without it, ``backward`` gets what ``forward`` saved.
    """

    blocks: Sequence[BlockSpec]
    room: Callable[[int], Tensor] = staticmethod(_plain_room)
    """Maker of the memory for :meth:`forward`'s result, of so many float32 values, which it does not set. Where results
    are sent as they are, the engine replaces it by memory that they are sent from; a kernel may use it or not."""
    checks_ids: bool = False
    """True if :meth:`forward` raises ``IndexError`` for an id that is no row of its block, and where bags hold another
    number of ids than there are."""
    states_per_row: frozenset[str] = frozenset()
    """The names of optimizer states that hold one value a row, the same in every column block of a table."""

    @abstractmethod
    def forward(self, bags: Bags, *, training: bool) -> tuple[Tensor, Any]:
        """Sum the rows of each bag.

        Args:
            bags: bags to look up.
            training: a backward call will follow.

        Returns:
            The float32 sums (``sum over slots of B * D`` elements) and whatever ``backward`` needs.
        """

    def prepare(self, bags: Bags) -> Any:
        """Return what ``backward`` needs for these bags, where their sums are not needed."""
        return self.forward(bags, training=True)[1]

    def prefetch(self, bags: Bags) -> None:  # noqa: B027 - most kernels have their rows at hand
        """Bring the rows of a coming lookup to where they are looked up; a pipeline calls it a batch ahead, if at all.

        It changes no result: a lookup is right without it, and bags may be prefetched that are never looked up. On an
        accelerator it is queued on another stream than lookups and updates: a kernel orders what they share itself.

        Args:
            bags: bags of a :meth:`forward` or :meth:`prepare` to come.
        """

    def anticipate(self, saved: Any) -> None:  # noqa: B027 - not every kernel has something to do then
        """Make what ``backward`` needs of the ids alone; called while results travel, if at all.

        Args:
            saved: state from ``forward`` in training.
        """

    @abstractmethod
    def backward(self, saved: Any, gradient: Tensor) -> Sequence[Tensor | None]:
        """Update the weights, or return the gradients of :meth:`parameters`.

        Args:
            saved: state from ``forward``.
            gradient: float32, flat, in the order of ``forward``'s result.

        Returns:
            One gradient for each of :meth:`parameters`.
        """

    def backward_scaled(self, saved: Any, gradient: Tensor, scale: float) -> Sequence[Tensor | None]:
        """:meth:`backward` with ``scale`` times the gradient, which is the engine's own and may be changed.

        A kernel that multiplies where it reads saves a pass over the gradient.
        """
        return self.backward(saved, gradient if scale == 1 else gradient.mul_(scale))

    def weight_gradients(self, saved: Any, gradient: Tensor) -> Tensor | None:
        """Return the gradient of each id's weight: the product of its row and its bag's gradient.

        Called before :meth:`backward` for the same bags, where the weights of ids are trained. ``None`` leaves it to
        the engine, which reads the rows in :meth:`weight`.

        Args:
            saved: state from ``forward`` in training.
            gradient: float32, flat, in the order of ``forward``'s result; not to be changed.

        Returns:
            ``[N]`` float32.
        """
        return None

    def row_sums(self, bags: Bags, gradients: Sequence[Tensor], out: Tensor) -> bool:
        """Add up the gradient of every row of all blocks; ``False`` leaves that, and their update, to the engine.

        Only for kernels whose optimizer is fused, and that have :meth:`update_rows` too.

        Args:
            bags: bags of one source, of all slots.
            gradients: the gradient of each slot's bags, ``[bags, C]``.
            out: flat float32; gets the rows of ``C`` columns of block after block, then, in this order, a mark of each
                row: 1 if it was looked up, else 0.
        """
        return False

    def update_rows(self, terms: Sequence[Tensor], scale: float) -> None:
        """Update each row that was looked up.

        Args:
            terms: row sums from :meth:`row_sums`, of one or several ranks, to be added up in this order: a row's mark
                is 0 in all if none looked it up.
            scale: factor of their sum.
        """
        raise AssertionError("only a kernel that makes row_sums is given them back")

    @abstractmethod
    def weight(self, block: int) -> Tensor:
        """``[rows, columns]``: the weights of a block, shared storage.

        Of a :class:`RowFormat` of the kernel's: stored rows, ``[rows, bytes]`` uint8.
        """

    def adopt(self, block: int, weight: Tensor) -> None:
        """Take over the weights of a block: a kernel that reads rows anywhere keeps ``weight`` itself, without a copy.

        The block then no longer uses what :meth:`weight` gave before.

        Args:
            block: the block.
            weight: weights in the form of :meth:`weight`, contiguous, on the lookup's device.
        """
        self.weight(block).copy_(weight)

    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """The parameters that autograd sees, one a block; none where the optimizer is fused."""
        return ()

    def optimizer_state(self, block: int) -> Mapping[str, Tensor]:
        """The optimizer state of a block under the names of the torch optimizer it stands for.

        Shapes are ``[rows, columns]``, ``[rows, 1]`` (for ``states_per_row``), or ``[]`` for ``step``, which counts the
        updates; storage is shared, but ``step`` is set with :meth:`load_step`.
        """
        return {}

    def row_index(self, block: int) -> RowIndex:
        """The index that finds the rows of a block's keys; only of kernels that declare ``row_state``."""
        raise AssertionError("only a kernel that declares row_state is asked for its index")

    def load_step(self, step: float) -> None:  # noqa: B027 - not every optimizer counts
        """Set the number of updates done, where the optimizer counts them."""

    def set_learning_rate(self, learning_rate: float) -> None:  # noqa: B027 - not every kernel has one
        """Use ``learning_rate`` from now on.

        A step has one rate: before each of a batch's calls (:meth:`forward`, :meth:`prepare`, :meth:`backward`,
        :meth:`update_rows`) the engine sets that with which its forward pass began, if another was set since. So a
        kernel may read it in whichever of them it likes.
        """
