"""Rows that are found by keys, on their way: which rows go where, only the kernels that have them know.

So the owners send each key, and what else the kernel knows of its row, to the ranks whose blocks the new row map gives
the key to. There ``load_rows`` says which row each key gets, and whether it gets one. Weights and optimizer states then
move as those of other tables do.

All ranks make these calls of a table together: 1. an all-to-all of counts, 2. one of rows: the local row that it was,
and the kernel's ``row_state``, int64. Legend: N rows of one flow, S values of ``row_state``, R rows of a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from shardwright.contracts.lookup import Lookup
from shardwright.errors import UnsupportedError
from shardwright.planning.layouts.blocks import Block, Ints
from shardwright.planning.layouts.moves import Flow, SharedRows
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.sharded.resharding.blocks import Place, TableMove, place_of
from shardwright.runtime.sharded.tables.table_state import LocalBlock

COUNTS, KEYS = "numbers of keys that are resharded", "keys that are resharded"
"""Labels of the exchanges."""

_INT64_BYTES = 8

FlowId: TypeAlias = tuple[int | None, Place, int | None, Place]
"""A flow of a table: ranks and places of its blocks."""


@frozen(eq=False)
class KeyedRows:
    """Rows of one flow, by their local rows in its blocks.

    Args:
        old: local rows of the source, rising: ``[N]``.
        new: local rows of the target, -1 of keys that get none; on other ranks than its own, zeros. ``[N]``.
    """

    old: Ints
    new: Ints

    def within(self, start: int, stop: int) -> SharedRows:
        """Those that are in a window of the source."""
        first, last = np.searchsorted(self.old, (start, stop))
        return SharedRows(self.old[first:last], self.new[first:last], int(last - first))


def key_bytes(move: TableMove, local: Sequence[LocalBlock]) -> int:
    """Bytes of keys on their way and of the rows found for them, about: those of some blocks twice, or none.

    Args:
        move: the table.
        local: its old and new blocks here.
    """
    num_rows = sum(own.block.num_rows for own in local)
    return 2 * num_rows * _INT64_BYTES * (1 + len(move.row_state)) if move.is_keyed else 0


def flow_id(flow: Flow) -> FlowId:
    """The key of a flow among those of its table."""
    return flow.source.rank, place_of(flow.source), flow.target.rank, place_of(flow.target)


def exchange_keys(
    env: ShardingEnv, move: TableMove, targets: Mapping[Place, tuple[Lookup, int]]
) -> dict[FlowId, KeyedRows]:
    """Tell new owners their keys, and have them find rows for these.

    Args:
        env: the ranks.
        move: the table.
        targets: lookup of each new block here, and the block's number in it; without those that stay as they are.

    Returns:
        The rows of each flow from or to this rank.
    """
    flows = list(move.layouts.flows(env.rank))
    sent = {flow_id(flow): _rows_of(move, flow) for flow in flows if flow.source.rank == env.rank}
    came = _exchanged(env, flows, sent, num_values=1 + len(move.row_state))
    rows = {key: KeyedRows(own[:, 0].numpy(), np.zeros(len(own), np.int64)) for key, own in sent.items()}
    for place in {place_of(flow.target): None for flow in flows if flow.target.rank == env.rank}:
        own = [flow for flow in flows if flow.target.rank == env.rank and place_of(flow.target) == place]
        told = [came[flow_id(flow)] for flow in own]
        found = _found(move, torch.cat(told), targets[place]) if place in targets else None
        counts = [len(each) for each in told]
        new = (
            torch.cat([each[:, 0] for each in told]) if found is None else found
        )  # one that stays has its rows
        for flow, each, places in zip(own, told, new.split(counts), strict=True):
            rows[flow_id(flow)] = KeyedRows(each[:, 0].numpy(), places.numpy())
    return rows


def _rows_of(move: TableMove, flow: Flow) -> Tensor:
    """The rows of a block here that go with a flow: local row, and ``row_state``, ``[N, 1 + S]``."""
    state = move.row_states[place_of(flow.source)]
    values = torch.cat([state[name].reshape(-1, 1).cpu() for name in move.row_state], 1)
    local = torch.arange(len(values)).unsqueeze(1)
    whole = torch.cat([local, values], 1)
    if move.layouts.is_same_map:
        return whole
    part = torch.as_tensor(move.new.layout.row_map.part_of(values[:, 0].numpy()))
    return whole[part == flow.target.rows.index]


def _found(move: TableMove, told: Tensor, target: tuple[Lookup, int]) -> Tensor:
    """Have a new block take its keys over: the local row of each, or -1, ``[N]``."""
    lookup, index = target
    state = {name: told[:, 1 + n : 2 + n] for n, name in enumerate(move.row_state)}
    source = lookup.load_rows(index, state)
    if source is None:
        raise UnsupportedError(
            f"table {move.spec.describe()}: the kernel {move.new.compute_kernel!r} takes keys, but its load_rows() "
            "does not say which row each key was given"
        )
    new = torch.full((len(told),), -1, dtype=torch.int64)
    taken = torch.nonzero(source >= 0).flatten()
    new[source[taken]] = taken
    return new


def _exchanged(
    env: ShardingEnv, flows: Sequence[Flow], sent: Mapping[FlowId, Tensor], *, num_values: int
) -> dict[FlowId, Tensor]:
    """Send the rows of each flow to its target's rank; return those that came, ``[N, 1 + S]`` each."""
    ranks = range(env.world_size)
    to = [[flow_id(f) for f in flows if (f.source.rank, f.target.rank) == (env.rank, rank)] for rank in ranks]
    of = [[flow_id(f) for f in flows if (f.source.rank, f.target.rank) == (rank, env.rank)] for rank in ranks]
    counts = [torch.tensor([len(sent[key]) for key in own], dtype=torch.int64) for own in to]
    expected = _all_to_all(env, counts, [len(own) for own in of], COUNTS)
    rows = [torch.cat([sent[key].flatten() for key in own]) if own else torch.empty(0).long() for own in to]
    came = _all_to_all(env, rows, [int(own.sum()) * num_values for own in expected], KEYS)
    found: dict[FlowId, Tensor] = {}
    for keys, sizes, values in zip(of, expected, came, strict=True):
        found |= zip(keys, values.view(-1, num_values).split(sizes.tolist()), strict=True)
    return found


def _all_to_all(
    env: ShardingEnv, sent: Sequence[Tensor], sizes: Sequence[int], label: str
) -> Sequence[Tensor]:
    """Send int64 values to each rank, and receive so many of each."""
    flat = torch.cat(list(sent))
    if env.world_size == 1:
        return [flat]
    received = flat.new_empty(sum(sizes), device=env.device_type)
    own_sizes, given = (
        [_INT64_BYTES * size for size in sizes],
        [_INT64_BYTES * len(own) for own in sent],
    )
    env.communicator.all_to_all(
        received.view(torch.uint8), flat.to(env.device_type).view(torch.uint8), own_sizes, given, label=label
    ).wait()
    return received.cpu().split(list(sizes))


def copy_rows(move: TableMove, block: Block, lookup: Lookup, index: int) -> None:
    """Take a block over that stays on its rank, into a lookup that is new.

    Args:
        move: the table.
        block: the block.
        lookup: its new lookup.
        index: its number in that.
    """
    place = place_of(block)
    state = move.row_states[place]
    local = torch.arange(block.num_rows).unsqueeze(1)
    told = torch.cat([local, *(state[name].reshape(-1, 1).cpu() for name in move.row_state)], 1)
    new = _found(move, told, (lookup, index))
    kept = new >= 0
    for name, value in move.sources[place].items():
        target = move.targets[place][name]
        target[new[kept].to(target.device)] = value[kept.to(value.device)].to(target.device)
