"""The parts of a sharded module as modules that print themselves: input dists, lookups, output dists."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from shardwright.planning.text import count_text
from shardwright.runtime.step.engine import CollectionEngine
from shardwright.runtime.step.executor import Executor


class Anatomy(nn.Module):
    """A part without parameters that prints what it does, line by line."""

    def __init__(self, name: str, lines: Callable[[], list[str]]) -> None:
        super().__init__()
        self._name, self._lines = name, lines

    def _get_name(self) -> str:
        return self._name

    def extra_repr(self) -> str:
        """The part's lines."""
        return "\n".join(self._lines())


def dists(engine: CollectionEngine, name: str, section: str) -> nn.ModuleList:
    """Modules that print a part of each executor of the engine.

    Args:
        engine: the engine.
        name: name of the modules.
        section: ``"input"``, the routes of ids, or ``"output"``, the origins of results.
    """

    def lines(executor: Executor) -> list[str]:
        return executor.anatomy()[section]

    return nn.ModuleList(Anatomy(name, partial(lines, executor)) for executor in engine.executors)


def lookups(engine: CollectionEngine) -> nn.ModuleList:
    """Modules that print the local kernel groups with their blocks."""

    def lines(index: int) -> list[str]:
        group = engine.groups[index]
        optimizer = group.blocks[0].request.optimizer
        head = f"{group.kernel_name}, {optimizer}" if group.kernel.fuses_optimizer else group.kernel_name
        blocks = [
            f"{spec.table.name}: {spec.block.num_rows} x {spec.block.num_columns} {spec.table.data_type} "
            f"from column {spec.block.columns.start}, {count_text(spec.num_slots, 'feature')}"
            for spec in group.blocks
        ]
        return [head, *blocks]

    return nn.ModuleList(Anatomy("Lookup", partial(lines, index)) for index in range(len(engine.groups)))
