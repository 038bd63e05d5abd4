"""The gradient of each row that a batch looked up, block by block, and updates of rows by their gradients.

Legend: W sources, S slots, U rows of a block that have a gradient, D columns of a block, C columns of its gradient (D,
or those of the whole table where the kernel needs whole rows), N ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.contracts.compute_kernel import ComputeKernel
from shardwright.contracts.lookup import Bags, BlockSpec
from shardwright.planning.arrays import Ints
from shardwright.runtime.step.segments import starts_of, sums, take


def row_gradients(bags: Bags, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the gradients of each distinct row.

    A row's gradient is the (weighted) sum of the gradients of the bags it was in. So this is a bag lookup: its bags are
    the rows, and its ids the former bags.

    Args:
        bags: bags that were looked up; their ids are rows of one tensor.
        gradient: gradients of the bags, ``[bags, C]`` float32.

    Returns:
        ``[U]`` rows in rising order and ``[U, C]`` gradients.
    """
    if bags.ids.numel() == 0:
        return bags.ids, gradient.new_zeros(0, gradient.shape[1])
    # Ids sorted stably: those of one row stand together, in the order of the batch, so that sums are reproducible.
    bag_of_id = bags.per_id(torch.arange(bags.num_bags, device=bags.ids.device))
    sorted_ids, order = torch.sort(bags.ids, stable=True)
    rows, counts = torch.unique_consecutive(sorted_ids, return_counts=True)
    weights = None if bags.weights is None else bags.weights[order]
    return rows, bag_sums(bag_of_id[order], gradient, counts, weights)


def bag_sums(ids: Tensor, rows: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
    """Compute the (weighted) sum of the rows of each bag, ``[bags, D]``.

    Args:
        ids: row numbers, bag after bag, ``[N]``.
        rows: rows to sum, ``[R, D]``.
        lengths: number of ids of each bag, ``[bags]``.
        weights: weight of each id, ``[N]``, or ``None``.
    """
    offsets = lengths.new_zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return F.embedding_bag(
        ids, rows, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
    )


def rows_as_bags(
    rows_of: Sequence[tuple[Tensor, Tensor]],
    dims: Ints,
    first_slots: Ints,
    *,
    is_pooled: bool,
    is_weighted: bool,
    is_matrix: bool,
    is_ragged: bool = False,
    scale: float = 1.0,
) -> tuple[Bags, Tensor]:
    """Express updates of rows by their gradients as a lookup: bags of one id each, in the first slot of each block.

    Pooled lookups want the same number of bags in every slot, so shorter slots are filled up with empty bags, unless
    bags are ragged.

    Args:
        rows_of: rows ``[U]`` of each block, which may repeat, and their gradients ``[U, C]``.
        dims: gradient columns of each slot, ``[S]``.
        first_slots: first slot of each block.
        is_pooled: the lookup has a result for each bag.
        is_weighted: its ids have weights.
        is_matrix: its gradients stand as ``[bags, columns of all slots]``; else slot after slot.
        is_ragged: slots may have different numbers of bags.
        scale: factor of the gradients.

    Returns:
        The bags of one source, and their gradient, flat.
    """
    used = np.zeros(len(dims), dtype=np.int64)
    used[first_slots] = [len(rows) for rows, _ in rows_of]
    counts = np.full_like(used, used.max()) if is_pooled and not is_ragged else used
    ids = torch.cat([rows for rows, _ in rows_of])
    gradient = torch.zeros(int((counts * dims).sum()), dtype=torch.float32, device=ids.device)
    lengths = torch.zeros(int(counts.sum()), dtype=torch.int32, device=ids.device)
    starts, columns, values = (starts_of(own).tolist() for own in (counts, dims, counts * dims))
    matrix = gradient.view(int(counts[0]), -1) if is_matrix and len(gradient) else None
    for slot, (_, own) in zip(first_slots.tolist(), rows_of, strict=True):
        count, dim = own.shape
        lengths[starts[slot] : starts[slot] + count] = 1
        if not count:
            continue
        if matrix is not None:
            room = matrix[:count, columns[slot] : columns[slot] + dim]
        else:
            room = gradient[values[slot] : values[slot] + count * dim].view(count, dim)
        torch.mul(own, scale, out=room)
    # The weights of ids are in the rows' gradients already.
    weights = torch.ones(len(ids), dtype=torch.float32, device=ids.device) if is_weighted else None
    return Bags(ids, lengths if is_pooled else None, weights, counts[None], is_ragged), gradient


class BlockBags:
    """The order in which a kernel group's lookups and gradients stand.

    Args:
        blocks: the group's blocks, in the order of their slots.
        kernel: their compute kernel.

    Attributes:
        first_slots: first slot of each block.
        dims: ``C`` of each block.
        slot_dims: ``C`` of each slot, ``[S]``.
    """

    def __init__(self, blocks: Sequence[BlockSpec], kernel: ComputeKernel) -> None:
        self._kernel = kernel
        counts = np.array([spec.num_slots for spec in blocks], dtype=np.int64)
        self.first_slots = starts_of(counts)
        self._slots = [slice(first, first + n) for first, n in zip(self.first_slots, counts, strict=True)]
        self.dims = [
            spec.table.embedding_dim if kernel.needs_whole_rows(spec.request) else spec.block.num_columns
            for spec in blocks
        ]
        self.slot_dims = np.repeat(np.array(self.dims, dtype=np.int64), counts)

    def of(self, bags: Bags, gradient: Tensor) -> Iterator[tuple[Bags, Tensor]]:
        """Yield the bags of each block, slot after slot, in each source after source; their gradients ``[bags, C]``."""
        counts, num_ids = bags.table, _ids_of_cells(bags)
        bag_starts, id_starts = (starts_of(own.reshape(-1)).reshape(own.shape) for own in (counts, num_ids))
        sizes = counts * self.slot_dims
        value_starts = starts_of(sizes.reshape(-1)).reshape(sizes.shape)
        # Pooled results of a kernel that declares it are [bags, columns of all slots], sources one after the other.
        is_matrix = self._kernel.batch_major and bags.lengths is not None and not bags.is_ragged
        columns = gradient.view(-1, int(self.slot_dims.sum())) if is_matrix else None
        first_columns = starts_of(self.slot_dims)

        def cells(values: Tensor, starts: Ints, lengths: Ints, slots: slice) -> Tensor:
            return take(values, starts[:, slots].T.reshape(-1), lengths[:, slots].T.reshape(-1))

        for slots, dim in zip(self._slots, self.dims, strict=True):
            own = Bags(
                ids=cells(bags.ids, id_starts, num_ids, slots),
                lengths=None if bags.lengths is None else cells(bags.lengths, bag_starts, counts, slots),
                weights=None if bags.weights is None else cells(bags.weights, id_starts, num_ids, slots),
                counts=(),
            )
            if columns is None:
                yield own, cells(gradient, value_starts, sizes, slots).view(-1, dim)
            else:
                yield own, torch.cat([columns[:, at : at + dim] for at in first_columns[slots].tolist()])


def _ids_of_cells(bags: Bags) -> Ints:
    """The ids of each source and slot: ``[W, S]``."""
    if bags.lengths is None:
        return bags.table
    bounds = np.append(0, np.cumsum(bags.table))
    return sums(bags.lengths.cpu().numpy(), bounds).reshape(bags.table.shape)
