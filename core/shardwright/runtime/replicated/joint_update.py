"""One update of a kernel group whose blocks were synchronised in different forms.

A kernel updates its group in one call, as if one rank had looked up the whole batch. The blocks of each form make
separate sources, in which the slots of the other blocks have no ids.

Legend: S slots of the group, n slots of some sources, W sources.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shardwright.contracts.lookup import Bags
from shardwright.planning.layouts.blocks import Ints
from shardwright.runtime.ranks.devices import sent_to
from shardwright.runtime.replicated.forms import Sources, UpdateForm
from shardwright.runtime.replicated.sizes import Copies
from shardwright.runtime.step.segments import index_of, starts_of


def update_jointly(copies: Copies, forms: Sequence[UpdateForm]) -> Sequence[Tensor | None]:
    """Make the whole batch's update of a group.

    Args:
        copies: the group of replicas.
        forms: update forms of the group's blocks; each block is in one of them.

    Returns:
        The gradients of the lookup's parameters.
    """
    pairs = [(form, form.sources()) for form in forms]
    sources = [own for _, own in pairs if own is not None]
    gradients: Sequence[Tensor | None] = ()
    if sources:  # before the others, because this call counts the optimizer's step
        bags, gradient = _joint(copies, sources)
        gradients = copies.lookup.backward(copies.lookup.prepare(bags), gradient)
    for form, own in pairs:
        if own is None:
            form.update()
    return gradients


def _joint(copies: Copies, sources: Sequence[Sources]) -> tuple[Bags, Tensor]:
    """Join the lookups of all forms into one, with its gradient."""
    widened = [_widened(copies, own) for own in sources]
    if len(widened) == 1:
        return widened[0]
    bags = [own for own, _ in widened]
    whole = Bags(
        ids=torch.cat([own.ids for own in bags]),
        lengths=_cat([own.lengths for own in bags]),
        weights=_cat([own.weights for own in bags]),
        counts=np.concatenate([own.table for own in bags]),
    )
    return whole, torch.cat([gradient for _, gradient in widened])


def _cat(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate; either all bags of a group have lengths (or weights), or none has."""
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(present) if present else None


def _widened(copies: Copies, sources: Sources) -> tuple[Bags, Tensor]:
    """Widen sources of some slots to all slots of the group.

    Ids and their order stay, because the added slots have none.
    """
    bags, slots = sources.bags, sources.slots
    if len(slots) == len(copies.dims):
        return bags, sources.gradient
    few = bags.table
    # In pooled lookups every slot of a source has the same number of bags; added slots have empty ones.
    counts = np.tile(few[:, :1] if copies.is_pooled else np.zeros_like(few[:, :1]), len(copies.dims))
    counts[:, slots] = few
    lengths = None
    if bags.lengths is not None:
        lengths = _spread(bags.lengths, counts, few, slots)
    return Bags(bags.ids, lengths, bags.weights, counts), _wide_gradient(copies, sources, counts)


def _spread(values: Tensor, counts: Ints, few: Ints, slots: Ints) -> Tensor:
    """Put values of the bags of some slots among zeros for the bags of the others.

    Args:
        values: values of the slots' bags, source after source: ``[bags]`` or ``[bags, D]``.
        counts: number of bags of each source and slot of the group, ``[W, S]``.
        few: number of bags of each source and given slot, ``[W, n]``.
        slots: places of the given slots in the group, ``[n]``.
    """
    starts = starts_of(counts.reshape(-1)).reshape(counts.shape)[:, slots]
    wide = values.new_zeros(int(counts.sum()), *values.shape[1:])
    wide[index_of(starts.reshape(-1), few.reshape(-1), values.device)] = values
    return wide


def _wide_gradient(copies: Copies, sources: Sources, counts: Ints) -> Tensor:
    """Put the sources' gradient in the order of the whole group's result, with zeros for the other slots."""
    gradient, dims = sources.gradient, copies.dims
    if not copies.is_matrix:
        width = int(dims[0])
        rows = gradient.view(gradient.numel() // width, width)
        return _spread(rows, counts, sources.bags.table, sources.slots).view(-1)
    columns = np.concatenate(
        [np.arange(start, start + dim) for start, dim in zip(starts_of(dims), dims, strict=True)]
        if len(dims)
        else [np.zeros(0, np.int64)]
    )
    is_own = np.repeat(np.isin(np.arange(len(dims)), sources.slots), dims)
    num_bags = int(counts[:, 0].sum())
    wide = gradient.new_zeros(num_bags, len(columns))
    own = sent_to(gradient.device, columns[is_own])
    wide.index_copy_(1, own, gradient.view(num_bags, len(own)))
    return wide.view(-1)
