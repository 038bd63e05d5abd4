"""Layouts on ranks with different devices: each with the device of the ranks that its shards may be on.

Where all ranks have one type of device, a sharding type is asked once. Where some have a CPU, it is asked for the ranks
of each type by themselves, so that a table's shards stay on one type, and for all ranks together, of which the layouts
are kept whose shards each have a given rank, such as copies on every rank. What keeps a shard on ranks of its device is
memory: its kernel's tier, which other ranks have none of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import attrs

from shardwright.contracts.sharding_type import ShardingType
from shardwright.planning.arrays import FREE
from shardwright.planning.layouts.layout import Block, BlockRun, BlockRuns, Layout
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.shapes import Runs, ShardRun, runs_of
from shardwright.planning.tables.constraints import ParameterConstraints
from shardwright.planning.tables.spec import TableSpec

Asked = Callable[[Topology], Sequence[Layout]]
"""Question to a sharding type: its layouts on some ranks."""


def layouts_on_devices(
    kind: ShardingType,
    table: TableSpec,
    topology: Topology,
    rule: ParameterConstraints,
    asked: Asked,
    go_on: Callable[[], None],
) -> Iterator[tuple[Layout, Runs]]:
    """Yield the layouts of a table with their runs, which each have a device.

    Args:
        kind: the sharding type.
        table: table to cut.
        topology: over what.
        rule: demands of the user on the table; with a ``device_group`` its shards stay on ranks of that.
        asked: asks the sharding type.
        go_on: called now and then; ends the work by raising.
    """
    if not topology.is_mixed:
        for layout in asked(topology):
            yield layout, runs_of(layout, topology.compute_device, go_on)
        return
    for device in topology.device_types:
        group = topology.of_device(device)
        if rule.device_group in (None, device) and kind.supports(table, group) is True:
            for layout in asked(group):
                if not any(dataflow.is_replicated for dataflow in layout.dataflows):
                    moved = _on_ranks_of(device, layout, topology)
                    yield moved, runs_of(moved, device, go_on)
    if rule.device_group is None:
        for layout in asked(topology):
            runs = runs_of(layout, "", go_on)
            if all(run.rank != FREE for run in runs):
                yield layout, tuple(parted_by_device(runs, topology))


def _on_ranks_of(device: str, layout: Layout, topology: Topology) -> Layout:
    """A layout that was made for the ranks of one device alone, on these ranks of all."""
    items = layout.blocks.runs if isinstance(layout.blocks, BlockRuns) else layout.blocks
    first = topology.ranks_of(device).start
    moved = [_moved(item, first, on_one_host=topology.num_hosts == 1) for item in items]
    variant = f"{layout.variant}, {device}" if layout.variant else device
    return attrs.evolve(layout, blocks=moved, variant=variant)


def _moved(item: Block | BlockRun, first: int, *, on_one_host: bool) -> Block | BlockRun:
    """Blocks whose given ranks begin at another first one; on one host a rank inside it is a rank."""
    rank = item.local_rank if on_one_host and item.local_rank is not None else item.rank
    moved: dict[str, Any] = {"rank": None if rank is None else rank + first}
    if on_one_host:
        moved |= {"host_group": None, "local_rank": None}
    return attrs.evolve(item, **moved)


def parted_by_device(runs: Runs, topology: Topology) -> Iterator[ShardRun]:
    """Yield runs of shards with given ranks, cut where the device changes."""
    for run in runs:
        devices = topology.compute_devices[run.rank : run.rank + run.length]
        for start, stop in _spans(devices):
            yield run._replace(rank=run.rank + start, length=stop - start, device=devices[start])


def _spans(devices: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Neighbours of equal devices: where they begin and end."""
    changes = [index for index in range(1, len(devices)) if devices[index] != devices[index - 1]]
    return pairwise([0, *changes, len(devices)])
