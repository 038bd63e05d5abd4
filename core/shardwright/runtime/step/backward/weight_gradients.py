"""Gradients of the weights of ids: of each id, the product of its row and the gradient of its bag.

A weighted sum is ``weight * row``, added up over the ids of a bag. So its derivative by an id's weight is the row.
Column blocks of a table each bring the part of their columns, which the id's own rank adds up.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from shardwright.contracts.compute_kernel import ComputeKernel
from shardwright.contracts.lookup import Bags, Lookup
from shardwright.planning.plan.sharding import ParameterSharding
from shardwright.planning.tables.spec import TableSpec
from shardwright.runtime.ranks.devices import is_host
from shardwright.runtime.step.backward.row_gradients import BlockBags
from shardwright.runtime.step.kernel_groups import kernel_of
from shardwright.runtime.step.segments import numbered

_ON_HOST, _ON_DEVICE = 1 << 17, 1 << 24
"""Elements of rows that are read at once: 512 KiB, which stay in a core's cache; 64 MiB, few launches."""


def weight_gradients(
    kernel: ComputeKernel, lookup: Lookup, bags: Bags, gradient: Tensor, saved: Any = None
) -> Tensor:
    """Compute the gradient of each id's weight, before the rows are updated: ``[N]`` float32.

    Args:
        kernel: compute kernel of a group.
        lookup: lookup of the group.
        bags: bags that were looked up.
        gradient: gradient of their sums, flat, in the order of the lookup's result.
        saved: state of the lookup's forward pass; ``None``: the kernel is not asked.
    """
    own = None if saved is None else lookup.weight_gradients(saved, gradient)
    if own is not None:
        return own
    gradients = gradient.new_zeros(bags.ids.numel())
    # Numbers of the ids take the place of their weights, so that those of each block are known.
    numbers = torch.arange(bags.ids.numel(), device=bags.ids.device)
    blocks = BlockBags(lookup.blocks, kernel).of(evolve(bags, weights=numbers), gradient)
    for block, (of_block, by_bag) in enumerate(blocks):
        if of_block.ids.numel():
            assert of_block.weights is not None  # the numbers
            gradients[of_block.weights] = _products(lookup, block, of_block, by_bag)
    return gradients


def _products(lookup: Lookup, block: int, bags: Bags, gradients: Tensor) -> Tensor:
    """The products of the rows of a block's ids and the gradients of their bags: ``[N]``."""
    columns = lookup.blocks[block].block.columns
    if gradients.shape[1] > columns.stop - columns.start:  # that of whole rows
        gradients = gradients[:, columns.start : columns.stop]
    assert bags.lengths is not None  # ids have weights in pooled lookups alone
    weight = lookup.weight(block)  # a kernel may have it in other memory than its device's
    ids, bag = bags.ids.to(weight.device), numbered(bags.lengths, bags.ids.numel())
    found = gradients.new_empty(len(bag))
    # In pieces: rows of all ids at once are many times the memory of the batch, and leave the host's caches.
    at_once = max(1, (_ON_HOST if is_host(gradients.device) else _ON_DEVICE) // gradients.shape[1])
    for own, of_bag, out in zip(*(whole.split(at_once) for whole in (ids, bag, found)), strict=True):
        rows = weight.index_select(0, own).to(gradients.device, torch.float32)
        torch.sum(rows.mul_(gradients.index_select(0, of_bag)), 1, out=out)
    return found


def weights_refusal(table: TableSpec, sharding: ParameterSharding) -> str:
    """The reason why the weights of a table's ids cannot be trained; empty if they can."""
    reason = kernel_of(sharding.compute_kernel).refusal_of_weight_gradients()
    return reason and (
        f"table {table.describe()}: the weights of ids require gradients, which compute kernel "
        f"{sharding.compute_kernel!r} does not give: {reason}. detach() them, or name another kernel in "
        f"constraints[{table.name!r}]"
    )
