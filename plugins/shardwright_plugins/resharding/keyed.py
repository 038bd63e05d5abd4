"""Rows that are found by keys, on their way: which rows go where, only the kernels that have them know.

So the owners send each key, and what else the kernel knows of its row, to the ranks whose blocks the new row map gives
the key to. There ``RowIndex.load`` says which row each key gets, and whether it gets one. Weights and optimizer states
then move as those of other tables do.

All ranks make these calls of a table together: 1. an all-to-all of counts, 2. one of rows: the local row that it was,
and the kernel's ``row_state``, int64. Legend: N rows of one flow, S values of ``row_state``, R rows of a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from shardwright.contracts.lookup import Lookup
from shardwright.planning.layouts.blocks import Block
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright_plugins.plan_differences.layout_moves import Flow
from shardwright_plugins.resharding.blocks import (
    FlowId,
    KeyedRows,
    Place,
    TableMove,
    flow_id,
    place_of,
)

COUNTS, KEYS = "numbers of keys that are resharded", "keys that are resharded"
"""Labels of the exchanges."""


def exchange_keys(
    env: ShardingEnv, move: TableMove, flows: Sequence[Flow], targets: Mapping[Place, tuple[Lookup, int]]
) -> dict[FlowId, KeyedRows]:
    """Tell new owners their keys, and have them find rows for these.

    Args:
        env: the ranks.
        move: the table.
        flows: its flows from or to this rank.
        targets: lookup of each new block here, and the block's number in it; without those that stay as they are.

    Returns:
        The rows of each flow.
    """
    sent = {flow_id(flow): _rows_of(move, flow) for flow in flows if flow.source.rank == env.rank}
    came = _exchanged(env, flows, sent, num_values=1 + len(move.row_state))
    rows = {key: KeyedRows(own[:, 0].numpy(), np.zeros(len(own), np.int64)) for key, own in sent.items()}
    for place in {place_of(flow.target): None for flow in flows if flow.target.rank == env.rank}:
        own = [flow for flow in flows if flow.target.rank == env.rank and place_of(flow.target) == place]
        told = [came[flow_id(flow)] for flow in own]
        together = torch.cat(told)
        # A block that stays as it is has its rows.
        new = _found(move, together, targets[place]) if place in targets else together[:, 0]
        for flow, each, places in zip(own, told, new.split([len(each) for each in told]), strict=True):
            rows[flow_id(flow)] = KeyedRows(each[:, 0].numpy(), places.numpy())
    return rows


def _listed(move: TableMove, block: Block) -> Tensor:
    """The rows of a block here: local row, and ``row_state``, ``[R, 1 + S]``."""
    state = move.row_states[place_of(block)]
    values = [state[name].reshape(-1, 1).cpu() for name in move.row_state]
    return torch.cat([torch.arange(len(values[0])).unsqueeze(1), *values], 1)


def _rows_of(move: TableMove, flow: Flow) -> Tensor:
    """The rows of a block here that go with a flow, ``[N, 1 + S]``."""
    every = _listed(move, flow.source)
    if move.layouts.is_same_map:
        return every
    part = torch.as_tensor(move.new.layout.row_map.part_of(every[:, 1].numpy()))
    return every[part == flow.target.rows.index]


def _found(move: TableMove, told: Tensor, target: tuple[Lookup, int]) -> Tensor:
    """Have a new block take its keys over: the local row of each, or -1, ``[N]``."""
    lookup, index = target
    state = {name: told[:, 1 + n : 2 + n] for n, name in enumerate(move.row_state)}
    source = lookup.row_index(index).load(state)
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
    splits, given = [received.itemsize * size for size in sizes], [own.nbytes for own in sent]
    env.communicator.all_to_all(
        received.view(torch.uint8), flat.to(env.device_type).view(torch.uint8), splits, given, label=label
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
    new = _found(move, _listed(move, block), (lookup, index))
    kept = new >= 0
    for name, value in move.sources[place_of(block)].items():
        target = move.targets[place_of(block)][name]
        target[new[kept].to(target.device)] = value[kept.to(value.device)].to(target.device)
