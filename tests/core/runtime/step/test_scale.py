"""What a step's work does not grow with: ranks, tables, features. Counted, not timed, in pretended worlds."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.core.runtime.plans import Cut, Cuts
from tests.pretended import pretended_env
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright import Dataflow, Exchange, Lookup, RowsModulo
from shardwright_plugins.dataflows import Hierarchical

HOST = 8


class Nothing(Lookup):
    """Finds zeros and updates nothing, so that only the engine's work is counted."""

    def __init__(self, blocks: Any, width: int) -> None:
        self.blocks, self._width = blocks, width
        self._weights = [torch.zeros(spec.block.num_rows, spec.block.num_columns) for spec in blocks]

    def forward(self, bags: Any, *, training: bool) -> tuple[torch.Tensor, Any]:
        return torch.zeros(int(bags.table.sum()) * self._width), None

    def backward(self, saved: Any, gradient: torch.Tensor) -> tuple[()]:
        return ()

    def weight(self, block: int) -> torch.Tensor:
        return self._weights[block]

    def set_learning_rate(self, learning_rate: float) -> None:
        pass


class Operations(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(operation)] += 1
        return operation(*args, **(kwargs or {}))


def calls_of(work: Callable[[], Any]) -> tuple[int, int]:
    """Python's calls, into C too, and torch's operations."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    with Operations() as operations:
        work()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count, sum(operations.counts.values())


def step_of(
    world_size: int, num_tables: int, dataflow: Dataflow, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int]:
    """The calls of a forward and a backward pass of one rank."""
    local = HOST if isinstance(dataflow, Hierarchical) else world_size
    ranks = tuple(range(local))
    tables = [
        Cut(
            4 * world_size, 4, (f"f{i}",), "SUM", RowsModulo(4 * world_size, len(ranks)), (), ranks,
            dataflow=dataflow,
        )
        for i in range(num_tables)
    ]  # fmt: skip
    case = Cuts(tables, world_size)
    monkeypatch.setattr("tests.core.runtime.plans.LoopLookup", lambda blocks, **_: Nothing(blocks, 4))
    env, communicator = pretended_env(world_size, local_world_size=local)
    monkeypatch.setattr(communicator, "_count", lambda *_: None)
    monkeypatch.setattr(communicator, "_answer", lambda *_: _fill(communicator, *_))
    sharded = case.shard(env, case.module())
    batch = case.batch(6, seed=1)
    gradient = torch.ones(6, 4 * num_tables)

    def step() -> None:
        sharded(batch).values().backward(gradient)

    step()
    return calls_of(step)


def _fill(communicator: Any, output: Any, sent: Any, output_splits: Any, input_splits: Any) -> None:
    """As pretending does, in as many calls whatever the number of ranks."""
    start = sum(input_splits[: communicator.rank])
    mine = sent[start : start + input_splits[communicator.rank]]
    output.zero_()
    if len(set(output_splits)) == 1 and output_splits[0] == len(mine):
        output.view(len(output_splits), -1).copy_(mine)


@pytest.mark.parametrize("dataflow", [Exchange(), Hierarchical()], ids=["exchange", "hierarchical"])
def test_step_makes_no_more_calls_among_more_ranks(dataflow, monkeypatch):
    few, many = (step_of(size, 6, dataflow, monkeypatch) for size in (16, 128))
    assert many[1] <= few[1] + 20
    assert many[0] <= few[0] * 1.2


@pytest.mark.parametrize("dataflow", [Exchange(), Hierarchical()], ids=["exchange", "hierarchical"])
def test_step_makes_no_more_calls_with_more_tables(dataflow, monkeypatch):
    few, many = (step_of(16, tables, dataflow, monkeypatch) for tables in (6, 48))
    assert many[1] <= few[1] + 20  # pieces are joined one by one, in one operation, or by an index, in a few
    assert many[0] <= few[0] * 1.2
