"""Tests of ``fused_triton``: interpreted on the CPU by ``TRITON_INTERPRET=1``, else compiled, on a CUDA device.

``test_triton.py`` runs this file in processes of its own: Triton reads the variable when it is imported, and a process
in which anybody imported it before cannot interpret.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.equality import Case, Table, assert_equals_unsharded, train_simulated
from tests.pairs import pairwise
from tests.plugins.compute_kernels.loops import OPTIMIZERS, Batch, block_spec, draw_batch, draw_sequences
from tests.plugins.optimizers.strangers import acme_ftrl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright import BlockSpec, ComputeKernel, Lookup, OptimizerSpec
from shardwright.host import host
from shardwright_plugins.compute_kernels.fused_triton import _kernels as kernels
from shardwright_plugins.compute_kernels.fused_triton import is_interpreted
from shardwright_plugins.compute_kernels.fused_triton._geometry import Tiles
from shardwright_testing import ComputeKernelTests, installed
from shardwright_testing.kernels.kernel_checks import check_close, check_sums, gradient_of, train, weights_of
from shardwright_testing.kernels.loops import build

DEVICE = torch.device("cpu" if is_interpreted() else "cuda")
FULL = DEVICE.type == "cuda"
SMALL = Tiles(items=16, unroll=2, window=4, bags=8, few=6)
WEIGHTS = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}


def kernel() -> ComputeKernel:
    return host().compute_kernels.create("fused_triton")


def spec(name: str, **parameters: Any) -> OptimizerSpec:
    return OptimizerSpec(name, 0.1, parameters)


def blocks_of(optimizer: OptimizerSpec, *shapes: tuple[int, int, int], **others: Any) -> list[BlockSpec]:
    """Blocks of (rows, dim, slots)."""
    return [
        block_spec(rows, dim, slots=slots, optimizer=optimizer, device=DEVICE.type, **others)
        for rows, dim, slots in shapes
    ]


@pytest.fixture(params=["usual tiles", "small tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and programs of a few ids, so that runs are longer than any of them; or what a device gets."""
    if request.param == "small tiles":
        monkeypatch.setattr(Tiles, "of", lambda *_: SMALL)


class TestFusedTriton(ComputeKernelTests):
    @pytest.fixture
    def compute_kernel(self) -> ComputeKernel:
        return kernel()


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(
    ("optimizer", "data_type", "columns"),
    pairwise([(name, kind, cut) for name in OPTIMIZERS for kind in WEIGHTS for cut in (None, (4, 8))]),
)
def test_runs_of_any_length_equal_loops(
    optimizer: str, data_type: str, columns: tuple[int, int] | None
) -> None:
    """One row of a table is in nearly every bag, others in few: runs end in, at, and far beyond windows."""
    shapes = ((1, 12, 1), (3, 12, 2), (40, 12, 1))
    blocks = blocks_of(spec(optimizer), *shapes, data_type=data_type, columns=columns)
    lookup, loops = build(kernel(), blocks, device=DEVICE)
    for step in range(2):
        batch = draw_batch(blocks, (3, 0, 5), is_weighted=step > 0, seed=step, max_length=6)
        if step:
            batch = batch.changed(lambda bag: [(row, weight + 2) for row, weight in bag])
        train(f"{optimizer}, {data_type}", lookup, loops, batch, DEVICE, seed=step)


@pytest.mark.usefixtures("tiles")
def test_widths_of_all_kinds_share_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup is one launch, an update of few ids three, and of many as many beside the sort, whatever the widths."""
    blocks = blocks_of(spec("adam"), (5, 3, 1), (4, 128, 2), (7, 17, 1), (2, 64, 1))
    lookup, loops = build(kernel(), blocks, device=DEVICE)
    batch = draw_batch(blocks, (6, 3), is_weighted=False, max_length=9)
    launched, launch = [], kernels.launch

    def counted(kernel: Any, *arguments: Any, **constants: Any) -> None:
        launched.append(kernel.__name__)
        launch(kernel, *arguments, **constants)

    monkeypatch.setattr(kernels, "launch", counted)
    check_sums("mixed widths", lookup, loops, batch, DEVICE)
    assert launched == ["look_up"]
    train("mixed widths", lookup, loops, batch, DEVICE)
    assert launched[1:] in (
        ["look_up", "list_ids", "update_chunks", "update_long_runs"],
        ["look_up", "list_ids", "sort_few", "update_chunks"],  # one window has all ids
    )


class Operators(TorchDispatchMode):
    """The operators of torch that launch something: not those that make room, or count the host's steps."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        makes_room = op._schema.name.removeprefix("aten::") in ("empty", "empty_like", "detach", "view")
        if not makes_room and not all(value.dim() == 0 for value in args if isinstance(value, Tensor)):
            self.names.append(str(op))
        return op(*args, **(kwargs or {}))


def test_update_of_a_small_batch_is_three_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tables as Criteo's data has, of 64 bags; a lookup is two launches, one for the ends of the bags."""
    blocks = blocks_of(spec("row_wise_adagrad"), *[(50, 16, 1)] * 26)
    lookup, loops = build(kernel(), blocks, device=DEVICE)
    batch = draw_batch(blocks, (64,), is_weighted=False, max_length=2)
    bags = batch.as_bags(DEVICE)
    gradient = gradient_of(loops, batch, 1).to(DEVICE)
    lookup.backward(lookup.forward(bags, training=True)[1], gradient)  # what is made once
    launched: list[str] = []
    monkeypatch.setattr(kernels, "launch", lambda kernel, *_, **__: launched.append(kernel.__name__))
    with Operators() as operators:
        _, saved = lookup.forward(bags, training=True)
        looked_up = [*launched, *operators.names]
        lookup.backward(saved, gradient)
    assert sorted(looked_up) == ["aten.cumsum.default", "look_up"]
    assert len([*launched, *operators.names]) - len(looked_up) <= 3, (launched, operators.names)


def test_few_ids_are_sorted_stably() -> None:
    lookup, _ = build(kernel(), blocks_of(spec("sgd"), (5, 8, 1)), device=DEVICE)
    for num_ids in (1, 31, 300):
        keys = torch.randint(0, 7, (num_ids,), dtype=torch.int32).to(DEVICE)
        found, expected = lookup._in_order(keys), torch.sort(keys, stable=True)  # type: ignore[attr-defined]
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def states_after(
    blocks: list[BlockSpec], batches: list[Batch], steps: Callable[[Lookup], None]
) -> list[Tensor]:
    """Weights and states after a step with each batch."""
    lookup, loops = build(kernel(), blocks, device=DEVICE)
    steps(lookup)
    for seed, batch in enumerate(batches):
        _, saved = lookup.forward(batch.as_bags(DEVICE), training=True)
        lookup.backward(saved, gradient_of(loops, batch, seed).to(DEVICE))
    states = [dict(lookup.optimizer_state(block)) for block in range(len(blocks))]
    return [*weights_of(lookup), *(state[name] for state in states for name in sorted(state))]


def test_equal_batches_give_equal_bits() -> None:
    """Twice, and however many ids a program works on: sums depend on windows, not on who adds them up."""
    blocks = blocks_of(spec("row_wise_adagrad"), (3, 8, 2), (50, 12, 1))
    batches = [draw_batch(blocks, (7, 4), is_weighted=True, seed=seed, max_length=12) for seed in range(2)]
    found = []
    for items in (64, 64, 8):

        def steps(lookup: Any, items: int = items) -> None:
            lookup.tiles = Tiles(items=items, unroll=2, window=16, few=0)

        found.append(states_after(blocks, batches, steps))
    for other in found[1:]:
        assert all(torch.equal(one, own) for one, own in zip(found[0], other, strict=True))


@pytest.mark.parametrize("pooling", ["SUM", "NONE"])
def test_gradients_of_weights_are_inner_products(pooling: str) -> None:
    blocks = blocks_of(spec("sgd"), (5, 8, 2), (9, 8 if pooling == "NONE" else 20, 1), pooling=pooling)
    lookup, loops = build(kernel(), blocks, device=DEVICE)
    batch = (
        draw_batch(blocks, (4, 3), is_weighted=True)
        if pooling == "SUM"
        else draw_sequences(blocks, 2, max_ids=9)
    )
    gradient = gradient_of(loops, batch, 1)
    _, saved = lookup.forward(batch.as_bags(DEVICE), training=True)
    found = lookup.weight_gradients(saved, gradient.to(DEVICE))  # type: ignore[attr-defined]
    check_close("gradients of weights", found, loops.weight_gradients(batch, gradient))


def updated(
    data_type: str, start: float, change: float, *, is_stochastic: bool, columns: int = 4096
) -> Tensor:
    """Weights after one step of SGD that takes `change` from `start`, in float32."""
    optimizer = OptimizerSpec("sgd", 1.0, {"stochastic_rounding": is_stochastic})
    blocks = blocks_of(optimizer, (1, columns, 1), data_type=data_type)
    lookup = kernel().build(blocks, device=DEVICE)
    lookup.weight(0).fill_(start)
    _, saved = lookup.forward(Batch([[[[(0, 1.0)]]]], False).as_bags(DEVICE), training=True)
    lookup.backward(saved, torch.full((columns,), change, device=DEVICE))
    return lookup.weight(0).float().cpu().reshape(-1)


@pytest.mark.parametrize(
    ("data_type", "start"),
    [("FP16", 1.0), ("FP16", -3.0), ("FP16", 2.0**-20), ("FP16", 0.0), ("BF16", 1.0), ("BF16", -(2.0**-9))],
)
def test_stochastic_rounding_keeps_the_mean(data_type: str, start: float) -> None:
    """A change of a quarter of the distance to the next number changes a quarter of the weights; else none."""
    own = torch.tensor(start).to(WEIGHTS[data_type])
    below = torch.nextafter(own, torch.tensor(-torch.inf, dtype=own.dtype)).float()
    distance = float(own.float() - below)
    if (
        data_type == "FP16" or FULL
    ):  # Triton's interpreter rounds bfloat16 towards zero, a device to the nearest
        assert (updated(data_type, start, distance / 4, is_stochastic=False) == start).all()
    found = updated(data_type, start, distance / 4, is_stochastic=True)
    assert set(found.tolist()) == {start, float(below)}
    # Of 4 096 draws with probability 1/4, the part is within 5 standard deviations, 0.034.
    assert abs((found == below).float().mean() - 0.25) < 5 * (0.25 * 0.75 / len(found)) ** 0.5


def test_batches_without_ids_change_nothing() -> None:
    blocks = blocks_of(spec("adam"), (5, 8, 2))
    lookup, loops = build(kernel(), blocks, device=DEVICE)
    for sources in ((0, 0), (3,)):
        batch = draw_batch(blocks, sources, is_weighted=False, max_length=0)
        train("no ids", lookup, loops, batch, DEVICE)


TYPES = ("table_wise", "column_wise", "row_wise", "data_parallel")


RULES: list[tuple[str, tuple[tuple[str, Any], ...]]] = [
    ("row_wise_adagrad", ()),
    ("acme_ftrl", (("l1", 0.01),)),
    ("partial_row_wise_adam", ()),
    ("adagrad", (("initial_accumulator_value", 0.3), ("weight_decay", 0.1))),
]


@pytest.mark.skipif(FULL, reason="simulated ranks run on the CPU")
@pytest.mark.parametrize("pooling", ["MEAN", "NONE"])
@pytest.mark.parametrize(("optimizer", "parameters"), RULES, ids=[name for name, _ in RULES])
def test_any_optimizer_trains_as_without_sharding(
    optimizer: str, parameters: tuple[tuple[str, Any], ...], pooling: str
) -> None:
    """A mix of sharding types through the engine, two simulated ranks, states of rows and elements on cut columns."""
    tables = [
        Table(7 + index, 8, (f"f{index}", "shared"), pooling, sharding_type, "fused_triton", offset=index)
        for index, sharding_type in enumerate(TYPES)
    ]
    case = Case(tables, (3, 2), optimizer, is_weighted=pooling != "NONE", parameters=parameters)
    with installed(acme_ftrl()):
        assert_equals_unsharded(case, train_simulated(case))


def test_any_optimizer_updates_without_asking_the_host() -> None:
    """Its launches are those of the lookup; what runs in torch has sizes that the host knows."""
    with installed(acme_ftrl()):
        blocks = blocks_of(spec("acme_ftrl"), (9, 8, 2), (5, 8, 1))
        lookup = kernel().build(blocks, device=DEVICE)
        assert type(lookup).__name__ == "RuleTritonLookup"
        batch = draw_batch(blocks, (6, 3), is_weighted=True)
        out, saved = lookup.forward(batch.as_bags(DEVICE), training=True)
        with Operators() as operators:
            lookup.backward(saved, torch.ones_like(out))
        waiting = ("nonzero", "unique", "_local_scalar_dense", "bincount", "masked_select")
        assert not [name for name in operators.names if any(word in name for word in waiting)]
