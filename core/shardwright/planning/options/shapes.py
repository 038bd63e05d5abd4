"""The blocks of layouts as runs: neighbouring blocks of one size that are placed alike, on ranks with one device.

Runs whose shards have given ranks are cut where the device or the speed of ranks changes, so that each shard of a run
costs the same.

Where all ranks have one type of device, a sharding type is asked once. Where some have a CPU, it is asked for the ranks
of each type by themselves, so that a table's shards stay on one type, and for all ranks together, of which the layouts
are kept whose shards each have a given rank, such as copies on every rank. What keeps a shard on ranks of its device is
memory: its kernel's tier, which other ranks have none of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeAlias

import attrs

from shardwright.contracts.sharding_type import ShardingType
from shardwright.errors import UnsupportedError
from shardwright.planning.arrays import FREE, NO_GANG
from shardwright.planning.layouts.layout import BlockRun, Layout
from shardwright.planning.machines.given import CPU_TIER, tiers_of
from shardwright.planning.machines.topology import CPU_DEVICE, Topology
from shardwright.planning.tables.constraints import ParameterConstraints
from shardwright.planning.tables.spec import TableSpec


class ShardRun(NamedTuple):
    """Neighbouring blocks of one size that are placed alike; the columns of the same names in ``Options`` say more.

    Args:
        num_rows: rows of each.
        num_columns: columns of each.
        gang: label of the blocks that share a host, or ``NO_GANG``.
        is_copy: every rank has a copy.
        id_fraction: the part of the table's lookups that is of the rows of each.
        rank: the rank of the first, the next on the next rank, and so on; or ``FREE``.
        local_rank: the rank of the first inside its host, likewise.
        length: number of blocks.
        device: type of the device of the ranks that they may be on.
    """

    num_rows: int
    num_columns: int
    gang: int
    is_copy: bool
    id_fraction: float
    rank: int
    local_rank: int
    length: int
    device: str = ""

    def continues(self, other: ShardRun) -> bool:
        """True if ``other`` begins where this ends and is of its kind."""
        return (
            self[:5] == other[:5]
            and other.rank == (FREE if self.rank == FREE else self.rank + self.length)
            and other.local_rank == (FREE if self.local_rank == FREE else self.local_rank + self.length)
        )


Runs: TypeAlias = tuple[ShardRun, ...]


def runs_of(layout: Layout, device: str, go_on: Callable[[], None] = lambda: None) -> Runs:
    """The blocks of a layout as runs, whose gangs are numbered from 0.

    Args:
        layout: the layout.
        device: type of the device of the ranks that its blocks may be on.
        go_on: called before a plugin is asked how many rows a block has, which may take long; ends that by raising.
    """
    pieces = chain.from_iterable(_parts(layout, run, go_on) for run in layout.blocks.ranked_runs)
    runs = _fold(pieces)
    labels = sorted({run.gang for run in runs} - {NO_GANG})
    gangs = {NO_GANG: NO_GANG, **{label: gang for gang, label in enumerate(labels)}}
    return tuple(run._replace(gang=gangs[run.gang], device=device) for run in runs)


def _number(value: int | None, offset: int = 0) -> int:
    return FREE if value is None else value + offset


def _parts(layout: Layout, run: BlockRun, go_on: Callable[[], None]) -> Iterator[ShardRun]:
    """A run of blocks in pieces of equally many rows; what is known of one's ids is known of all."""
    is_copy = (run.dataflow or layout.dataflow).is_replicated
    go_on()
    for start, rows, count in run.sizes():
        go_on()
        yield ShardRun(
            rows,
            len(run.columns),
            NO_GANG if run.host_group is None else run.host_group,
            is_copy,
            run.row_map.id_fraction_of(run.first_part + (0 if run.is_copied else start)),
            _number(run.rank, start),
            _number(run.local_rank, start),
            count,
        )


def _fold(runs: Iterable[ShardRun]) -> list[ShardRun]:
    """The runs, those joined that continue the one before."""
    found: list[ShardRun] = []
    for run in runs:
        if found and found[-1].continues(run):
            found[-1] = found[-1]._replace(length=found[-1].length + run.length)
        else:
            found.append(run)
    return found


def layouts_on_devices(
    kind: ShardingType,
    table: TableSpec,
    topology: Topology,
    rule: ParameterConstraints,
    go_on: Callable[[], None],
    declined: list[str],
) -> Iterator[tuple[Layout, Runs]]:
    """Yield the layouts of a table with their runs, which each have a device.

    Args:
        kind: the sharding type.
        table: table to cut.
        topology: over what.
        rule: demands of the user on the table; with a ``device_group`` its shards stay on ranks of that.
        go_on: called now and then; ends the work by raising.
        declined: receives the reasons of the type to give no layouts.
    """
    if not topology.is_mixed:
        for layout in _asked(kind, table, topology, rule, declined):
            runs = runs_of(layout, topology.compute_device, go_on)
            yield layout, tuple(parted_by_class(runs, topology)) if len(topology.classes) > 1 else runs
        return
    for device in topology.device_types:
        group = group_of(topology, device)
        if rule.device_group in (None, device) and kind.supports(table, group) is True:
            for layout in _asked(kind, table, group, rule, declined):
                if not any(dataflow.is_replicated for dataflow in layout.dataflows):
                    moved = _on_ranks_of(device, layout, topology)
                    yield moved, tuple(parted_by_class(runs_of(moved, device, go_on), topology))
    if rule.device_group is None:
        for layout in _asked(kind, table, topology, rule, declined):
            runs = runs_of(layout, "", go_on)
            if all(run.rank != FREE for run in runs):
                yield layout, tuple(parted_by_class(runs, topology))


def _asked(
    kind: ShardingType, table: TableSpec, ranks: Topology, rule: ParameterConstraints, declined: list[str]
) -> tuple[Layout, ...]:
    """Ask a sharding type for layouts on some ranks, which must have different variants."""
    try:
        answer: object = kind.layouts(table, ranks, rule)
        if not isinstance(answer, Iterable):
            raise TypeError(f"layouts() must give Layouts, it gave {answer!r}")
        offered = tuple(answer)
    except UnsupportedError as reason:
        declined.append(str(reason) or type(reason).__name__)
        return ()
    for layout in offered:
        if not isinstance(layout, Layout):
            raise TypeError(f"layouts() must give Layouts, it gave a {type(layout).__name__}")
    twice = [name for name, count in Counter(layout.variant for layout in offered).items() if count > 1]
    if twice:
        raise TypeError(
            f"layouts() gave {len(offered)} layouts, of which several have the variant {twice[0]!r}; give each a "
            "variant of its own, which tells them apart in plan and report"
        )
    return offered


def group_of(topology: Topology, device: str) -> Topology:
    """The ranks whose device is of a type, by themselves, in a topology of mixed devices."""
    ranks = topology.ranks_of(device)
    own = slice(ranks.start, ranks.stop)
    tiers = {"ddr": CPU_TIER} if device == CPU_DEVICE else {tier: tier for tier in tiers_of(device)}
    return topology.evolved(
        world_size=len(ranks),
        compute_devices=topology.compute_devices[own],
        local_world_size=min(topology.local_world_size, len(ranks)),
        memory_bytes={tier: topology.memory_bytes[name][own] for tier, name in tiers.items()},
        memory_bandwidths={tier: topology.memory_bandwidths[name] for tier, name in tiers.items()},
        replicas=None,
        speeds=topology.speeds[own],
    )


def _on_ranks_of(device: str, layout: Layout, topology: Topology) -> Layout:
    """A layout that was made for the ranks of one device alone, on these ranks of all."""
    first = topology.ranks_of(device).start
    moved = [_moved(run, first, on_one_host=topology.num_hosts == 1) for run in layout.blocks.ranked_runs]
    variant = f"{layout.variant}, {device}" if layout.variant else device
    return attrs.evolve(layout, blocks=moved, variant=variant)


def _moved(run: BlockRun, first: int, *, on_one_host: bool) -> BlockRun:
    """Blocks whose given ranks begin at another first one; on one host a rank inside it is a rank."""
    rank = run.local_rank if on_one_host and run.local_rank is not None else run.rank
    moved: dict[str, Any] = {"rank": None if rank is None else rank + first}
    if on_one_host:
        moved |= {"host_group": None, "local_rank": None}
    return attrs.evolve(run, **moved)


def parted_by_class(runs: Runs, topology: Topology) -> Iterator[ShardRun]:
    """Yield the runs, those of shards with given ranks cut where the device or the speed changes."""
    of_ranks = list(zip(topology.compute_devices, topology.speeds, strict=True))
    for run in runs:
        # On one host the rank inside it is the rank.
        first = run.local_rank if run.rank == FREE and topology.num_hosts == 1 else run.rank
        own = of_ranks[first : first + run.length] if first != FREE else []
        changes = [index for index in range(1, len(own)) if own[index] != own[index - 1]]
        for start, stop in pairwise([0, *changes, run.length]):
            yield run._replace(
                rank=_number(None if run.rank == FREE else run.rank, start),
                local_rank=_number(None if run.local_rank == FREE else run.local_rank, start),
                length=stop - start,
                device=own[start][0] if own else run.device,
            )
