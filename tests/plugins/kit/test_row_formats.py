"""The conformance tests of row formats find what is wrong with a format."""

from __future__ import annotations

import pytest
import torch
from tests.own_rows import SCALE, OwnRows, kernel_of

from shardwright_testing import RowFormatTests, ServingKernelTests


class TestOwnRows(RowFormatTests):
    @pytest.fixture(params=[8, 4, 2])
    def row_format(self, request):
        return OwnRows("OWN", request.param)


class TestOwnKernel(ServingKernelTests):
    @pytest.fixture
    def compute_kernel(self):
        return kernel_of(OwnRows("OWN4", 4))()


class OneScaleForAllRows(OwnRows):
    def pack(self, values):
        stored = super().pack(
            values.flatten().unsqueeze(0).expand(len(values), -1) if len(values) else values
        )
        return stored[:, : self.row_bytes(values.shape[1])]


class ForgetsTheScale(OwnRows):
    def columns(self, stored, num_columns, start, stop):
        own = super().columns(stored, num_columns, start, stop).clone()
        own[:, :SCALE] = 0
        return own


class JoinsBackwards(OwnRows):
    def join(self, blocks, widths):
        return super().join(blocks[::-1], widths[::-1])


class BoundTooSmall(OwnRows):
    def error_bound(self, stored, num_columns):
        return super().error_bound(stored, num_columns) / 4


class ForgetsBytes(OwnRows):
    def row_bytes(self, num_columns):
        return super().row_bytes(num_columns) - SCALE


class ChangesTheValues(OwnRows):
    def pack(self, values):
        return super().pack(values.mul_(0.5))


class NamedAsAFloat(OwnRows):
    def __init__(self, name):
        super().__init__("FP16")


@pytest.mark.parametrize(
    ("mutant", "test", "arguments", "text"),
    [
        (
            OneScaleForAllRows,
            "test_rows_are_packed_each_by_itself",
            (17,),
            "packed otherwise than among all rows",
        ),
        (
            ForgetsTheScale,
            "test_blocks_of_columns_hold_the_same_values_and_join_again",
            ((2, 3, 2),),
            "hold other values",
        ),
        (
            JoinsBackwards,
            "test_blocks_of_columns_hold_the_same_values_and_join_again",
            ((2, 3, 2),),
            "not what they were",
        ),
        (BoundTooSmall, "test_packed_values_are_within_the_bound", (64,), "more than error_bound"),
        (ForgetsBytes, "test_packed_values_are_within_the_bound", (8,), "pack\\(\\) of 6 x 8 gives"),
        (ChangesTheValues, "test_packed_values_are_within_the_bound", (8,), "changed the values"),
        (NamedAsAFloat, "test_declarations_can_be_planned_with", (), "the name of a float of torch"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_mistake_fails_with_a_message_that_says_it(mutant, test, arguments, text):
    with pytest.raises(AssertionError, match=text):
        getattr(RowFormatTests(), test)(mutant("OWN8"), *arguments)


def test_kernel_that_declares_fewer_bytes_than_its_rows_take_is_found():
    kind = kernel_of(OwnRows("OWN8"))
    kind.memory_bytes = lambda self, request, num_rows: {"device": num_rows * request.num_columns}
    with pytest.raises(AssertionError, match="100 rows of OWN8 take"):
        ServingKernelTests().test_declarations_can_be_planned_with(kind())


def test_kernel_whose_sums_are_others_is_found(monkeypatch):
    monkeypatch.setattr(OwnRows, "unpack", lambda self, stored, columns: torch.ones(len(stored), columns))
    kernel = kernel_of(OwnRows("OWN8"))()
    build = kernel.build

    def doubled(blocks, *, device):
        lookup = build(blocks, device=device)
        forward = lookup.forward
        monkeypatch.setattr(
            lookup, "forward", lambda bags, training: (2 * forward(bags, training=training)[0], None)
        )
        return lookup

    monkeypatch.setattr(kernel, "build", doubled)
    with pytest.raises(AssertionError, match="sums of OWN8 rows"):
        ServingKernelTests().test_forward_sums_the_rows_of_each_bag(kernel, False)
