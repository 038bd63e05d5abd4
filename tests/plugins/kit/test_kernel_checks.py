"""What checks of the kit find wrong: times of kernels, updates, shares of ids, codecs; the rest is in `conformance`."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.runtime.exact_codecs import Doubles, Mirrored
from tests.plugins import broken

import shardwright as sw
from shardwright.planning.tables.optimizers import OptimizerSpec
from shardwright_testing.codecs import check_codec
from shardwright_testing.kernels.kernel_checks import check_times
from shardwright_testing.kernels.kernel_faults import updates_look_like
from shardwright_testing.kernels.loops import Batch, Loops, block_spec
from shardwright_testing.row_maps import check_row_map

REQUEST = sw.KernelRequest("cpu", sw.DataType.FP32, 8, 8)


def check_what_is_told(answer: Any) -> None:
    check_times(broken.answering(broken.Kernel, "times_ms", lambda request, work: answer(work)), REQUEST)


def test_check_times_refuses_one_array_of_both_times() -> None:
    check_what_is_told(lambda work: (work.ids, work.vectors))
    with pytest.raises(AssertionError, match="not a pair of arrays"):
        check_what_is_told(lambda work: np.stack([work.ids, work.vectors]))


def test_check_times_gives_work_that_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        check_what_is_told(lambda work: (np.multiply(work.ids, 2, out=work.ids), work.vectors))


RATE = 0.1
BAGS = [[(0, 2.0), (1, 3.0)], [(1, -1.0), (2, 4.0), (2, 5.0)], []]
IDS, WEIGHTS = (torch.tensor([pair[place] for bag in BAGS for pair in bag]) for place in (0, 1))
BAG_OF = torch.tensor([0, 0, 1, 1, 1])
GRADIENT = torch.arange(1.0, 13.0)
OF_EACH = GRADIENT.view(3, 4)[BAG_OF].double()


def lengths() -> torch.Tensor:
    return torch.tensor([2.0, 3.0])[BAG_OF, None]


@pytest.mark.parametrize(
    ("step", "adds", "told"),
    [
        (OF_EACH * WEIGHTS[:, None], True, ""),
        (OF_EACH, True, "the weights of ids are lost: this is the update without them. "),
        (OF_EACH * WEIGHTS[:, None] / lengths(), True, "this is the update of means; "),
        (
            OF_EACH * WEIGHTS[:, None],
            False,
            "of an id that is in the batch more than once, only the last counts. ",
        ),
        (OF_EACH * 0, True, "nothing was updated. "),
        (OF_EACH * 7, True, ""),
    ],
    ids=["right", "no weights", "means", "assigned by index", "not at all", "unknown"],
)
def test_updates_look_like_names_the_fault(step: torch.Tensor, adds: bool, told: str) -> None:
    spec = block_spec(4, 4, optimizer=OptimizerSpec("sgd", RATE))
    before = Loops([spec], [torch.arange(16, dtype=torch.float64).view(4, 4)], batch_major=False)
    weight = before.weights[0].clone()
    if adds:
        weight.index_add_(0, IDS, step, alpha=-RATE)
    else:
        weight[IDS] -= RATE * step
    found = updates_look_like(weight, 0, before, Batch([[BAGS]], is_weighted=True), GRADIENT, RATE)
    assert found.startswith(told)
    assert bool(found) == bool(told)
    assert torch.equal(before.weights[0], torch.arange(16, dtype=torch.float64).view(4, 4))


@attrs.frozen
class Tilted(sw.RowsModulo):
    """The first part is said to get more than all ids, the second less than none."""

    name = "tilted"

    def id_fraction_of(self, part: int) -> float:
        return (1.5, -0.5)[part]


def test_check_row_map_refuses_a_share_of_ids_below_none() -> None:
    check_row_map("right", sw.RowsModulo(10, parts=2))
    with pytest.raises(AssertionError, match=r"is \[1\.5, -0\.5\]; each must be between 0 and 1"):
        check_row_map("tilted", Tilted(10, parts=2))


VALUES = torch.arange(12.0).view(4, 3) - 5


class WritesBehind(Doubles):
    def encode(self, values, encoded):
        super().encode(values, encoded)
        torch.as_strided(encoded, (1,), (1,), encoded.storage_offset() + encoded.numel()).fill_(0)


class WritesBeside(Doubles):
    def decode(self, encoded, values):
        super().decode(encoded, values)
        torch.as_strided(values, (1,), (1,), values.storage_offset() - 1).fill_(0)


class DependsOnOtherRows(Mirrored):
    def decode(self, encoded, values):
        super().decode(encoded, values)
        values += 0.5 * (values.shape[0] > 1)

    def error_bound(self, values):
        return torch.full_like(values, 0.1 if values.shape[0] == 1 else 1.0)


class ForgetsItsShape(Doubles):
    """Says that it is elementwise, and is not."""

    def decode(self, encoded, values):
        super().decode(encoded, values)
        values *= values.shape[0]

    def error_bound(self, values):
        return torch.full_like(values, 100.0)


class HasAHeader(Doubles):
    """Elementwise but for 8 bytes before each row."""

    def row_bytes(self, num_columns):
        return 8 * num_columns + 8

    def encode(self, values, encoded):
        encoded[:, 8:] = (-values.double()).view(torch.uint8)

    def decode(self, encoded, values):
        values.copy_(-encoded[:, 8:].reshape(-1).clone().view(torch.float64).view(values.shape))


@settings(max_examples=100)
@given(st.integers(0, 4), st.integers(1, 6), st.integers(0, 1000))
def test_check_codec_gives_back_what_exact_codecs_give(rows, columns, seed):
    values = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed))
    for codec in (Doubles(), Mirrored()):
        assert torch.equal(check_codec(codec, values), values)


@pytest.mark.parametrize(
    ("codec", "told"),
    [
        (WritesBehind, "encode wrote behind its rows"),
        (WritesBeside, "decode wrote beside its rows"),
        (DependsOnOtherRows, "what comes back depends on other rows"),
        (HasAHeader, "is elementwise, but row_bytes gives 104, not 192"),
        (ForgetsItsShape, "what comes back depends on a block's shape"),
    ],
)
def test_check_codec_finds_what_breaks_the_contract(codec, told):
    with pytest.raises(AssertionError, match=told):
        check_codec(codec(), VALUES.clone())
