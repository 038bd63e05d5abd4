"""The parts of a sharded module as modules that print themselves: input dists, lookups, output dists."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from shardwright.runtime.exchange import PooledExchange


class Part(nn.Module):
    """A part without parameters that prints what it does, line by line."""

    def __init__(self, name: str, lines: Callable[[], list[str]]) -> None:
        super().__init__()
        self._name, self._lines = name, lines

    def _get_name(self) -> str:
        return self._name

    def extra_repr(self) -> str:
        """The part's lines."""
        return "\n".join(self._lines())


def input_dist(exchange: PooledExchange) -> Part:
    """Collectives 1 and 2: which features go to how many slots of which rank."""

    def lines() -> list[str]:
        plan = exchange.plan
        return [
            f"rank {rank}: {len(plan.slots_of(rank))} slots of "
            f"{len({plan.streams[slot.stream].feature for slot in plan.slots_of(rank)})} features"
            for rank in range(len(plan.groups))
        ]

    return Part("InputDist", lines)


def lookups(exchange: PooledExchange) -> nn.ModuleList:
    """The local kernel groups with their blocks."""

    def lines(index: int) -> list[str]:
        group = exchange.groups[index]
        optimizer = group.blocks[0].request.optimizer
        head = f"{group.kernel_name}, {optimizer}" if group.kernel.fuses_optimizer else group.kernel_name
        blocks = [
            f"{spec.table.name}: {spec.block.num_rows} x {spec.block.num_columns} {spec.table.data_type.value} "
            f"from column {spec.block.columns.start}, {spec.num_slots} features"
            for spec in group.blocks
        ]
        return [head, *blocks]

    return nn.ModuleList(Part("Lookup", partial(lines, index)) for index in range(len(exchange.groups)))


def output_dist(exchange: PooledExchange) -> Part:
    """Collective 3 (and 4, backward): the columns each rank contributes."""

    def lines() -> list[str]:
        widths = exchange.arrangement.widths
        shares = ", ".join(f"rank {rank} {width}" for rank, width in enumerate(widths))
        return [f"{exchange.plan.width} columns from {shares}"]

    return Part("OutputDist", lines)
