"""One update of a kernel group, of whose blocks some were synchronised in one form and some in another.

A kernel updates its group in one call, as if one rank had looked the whole batch up: the blocks of each form are
sources of their own, in which the slots of the other blocks have no ids.

Legend: S slots, B bags of a slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.runtime.copies import Chosen
from shardwright.runtime.dense_form import DenseForm
from shardwright.runtime.groups import Group
from shardwright.runtime.lookup import Bags, Lookup
from shardwright.runtime.return_paths import pack_slots, split_slots
from shardwright.runtime.update_forms import Sources, UpdateForm


def update_jointly(lookup: Lookup, group: Group, forms: Sequence[UpdateForm]) -> Sequence[Tensor | None]:
    """Make the whole batch's update of a group.

    Args:
        lookup: of the group.
        group: the group.
        forms: those of its blocks, each of which is in one.

    Returns:
        The gradients of the lookup's parameters.
    """
    dense = [form for form in forms if isinstance(form, DenseForm) and form.is_of_kernel]
    others = [form for form in forms if form not in dense]
    gradients: Sequence[Tensor | None] = ()
    if others:  # first, since it counts the step
        bags, packed = _joint([(form.chosen, form.sources()) for form in others])
        gradients = lookup.backward(lookup.prepare(bags), torch.cat(list(packed)))
    for form in dense:
        form.update_rows()
    return gradients


def _joint(parts: Sequence[tuple[Chosen, Sources]]) -> Sources:
    """The lookups of all blocks, of those of each form."""
    if len(parts) == 1 and parts[0][0].is_all:
        return parts[0][1]
    widened = [_widened(chosen, *sources) for chosen, sources in parts]
    bags = [own for own, _ in widened]
    whole = Bags(
        ids=torch.cat([own.ids for own in bags]),
        lengths=_cat([own.lengths for own in bags]),
        weights=_cat([own.weights for own in bags]),
        counts=tuple(counts for own in bags for counts in own.counts),
    )
    return whole, [gradient for _, gradients in widened for gradient in gradients]


def _cat(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """All in a row; of one group's bags all have lengths (or weights), or none has."""
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(present) if present else None


def _widened(chosen: Chosen, bags: Bags, gradients: Sequence[Tensor]) -> Sources:
    """The same sources with all slots of the group; ids and their order stay, as the others have none."""
    is_pooled = bags.lengths is not None
    counts = [_of_all_slots(chosen, own, own[0] if is_pooled else 0) for own in bags.counts]
    lengths = None
    if bags.lengths is not None:
        pieces = bags.lengths.split([sum(own) for own in bags.counts])
        lengths = torch.cat([_wide_lengths(chosen, own) for own in pieces])
    wide = [
        _wide_gradient(chosen, own, few, all_counts)
        for own, few, all_counts in zip(gradients, bags.counts, counts, strict=True)
    ]
    return Bags(bags.ids, lengths, bags.weights, tuple(counts)), wide


def _of_all_slots(chosen: Chosen, counts: Sequence[int], other: int) -> tuple[int, ...]:
    """The bags of each slot of the group; slots that are not among the chosen have ``other``."""
    every = [other] * len(chosen.group.slots)
    for slot, count in zip(chosen.slots, counts, strict=True):
        every[slot] = count
    return tuple(every)


def _wide_lengths(chosen: Chosen, lengths: Tensor) -> Tensor:
    """``[S * B]``: zeros for the other slots."""
    few = lengths.view(len(chosen.slots), -1)
    every = few.new_zeros(len(chosen.group.slots), few.shape[1])
    every[chosen.slots] = few
    return every.view(-1)


def _wide_gradient(
    chosen: Chosen, gradient: Tensor, counts: Sequence[int], all_counts: Sequence[int]
) -> Tensor:
    """A source's gradient in the order of the whole group's result: zeros for the other slots."""
    zero = gradient.new_zeros(())
    dims = chosen.group.gradient_dims
    pieces = [zero.expand(count, dim) for count, dim in zip(all_counts, dims, strict=True)]
    own = split_slots(chosen.part, gradient, counts, gradient=True)
    for slot, piece in zip(chosen.slots, own, strict=True):
        pieces[slot] = piece
    packed = gradient.new_empty(chosen.group.num_elements(all_counts, gradient=True))
    pack_slots(chosen.group, pieces, packed)
    return packed
