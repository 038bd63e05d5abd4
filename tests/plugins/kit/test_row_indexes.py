"""The kit for row indexes finds mistakes, and the index of the authors' page makes none; so does the kernel with it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests import readme

import shardwright as sw
from shardwright_testing import ComputeKernelTests, RowIndexTests

PAGE = Path(sw.__file__).parent / "docs" / "authors" / "row_index.md"


def of_page(name: str) -> ModuleType:
    """A module of the page."""
    module = sys.modules[name] = ModuleType(name)
    exec(compile(readme.source(f"{name}.py", PAGE), f"{name}.py", "exec"), module.__dict__)
    return module


FifoIndex: Any = of_page("acme_fifo_index").FifoIndex


class TestFifoIndex(RowIndexTests):
    @pytest.fixture
    def make_index(self) -> Callable[[int], sw.RowIndex]:
        return FifoIndex


class TestFifo(ComputeKernelTests):
    optimizers = ("sgd", "row_wise_adagrad")

    @pytest.fixture
    def compute_kernel(self) -> sw.ComputeKernel:
        return of_page("acme_fifo").Fifo()

    # A dictionary's bytes are not those of tensors.
    test_declared_memory_is_what_is_allocated = None


class ForgetsKeys(FifoIndex):
    def load(self, state: Any) -> Any:
        source = super().load(state)
        self.row_of = {}
        return source


class MixesUpRows(FifoIndex):
    def load(self, state: Any) -> Any:
        return super().load(state).roll(1)


class BearsWhenServing(FifoIndex):
    def resolve(self, keys: Any, *, training: bool) -> Any:
        return super().resolve(keys, training=True)


class EvictsFromTheStep(FifoIndex):
    def bear(self, key: int, wanted: Any) -> Any:
        return super().bear(key, ())


class EvictsFromAFullStep(FifoIndex):
    def bear(self, key: int, wanted: Any) -> Any:
        return super().bear(key, wanted) or super().bear(key, ())


class CountsNoEviction(FifoIndex):
    def bear(self, key: int, wanted: Any) -> Any:
        born = super().bear(key, wanted)
        self.num_evicted = 0
        return born


class HidesBirths(FifoIndex):
    def resolve(self, keys: Any, *, training: bool) -> Any:
        rows, _ = super().resolve(keys, training=training)
        return rows, torch.empty(0, dtype=torch.int64)


@pytest.mark.parametrize(
    ("mutant", "test", "text"),
    [
        (ForgetsKeys, "test_keys_move_with_what_is_known_of_them", "have no row after they moved"),
        (MixesUpRows, "test_keys_move_with_what_is_known_of_them", "load"),
        (
            BearsWhenServing,
            "test_lookup_without_training_changes_nothing",
            "keys never trained have the rows",
        ),
        (
            EvictsFromTheStep,
            "test_full_index_keeps_the_keys_of_the_step_and_counts_evictions",
            "lost the rows that the same step looks them up in",
        ),
        (
            EvictsFromAFullStep,
            "test_full_index_keeps_the_keys_of_the_step_and_counts_evictions",
            "lost the rows that the same step looks them up in",
        ),
        (
            CountsNoEviction,
            "test_full_index_keeps_the_keys_of_the_step_and_counts_evictions",
            "keys lost their rows, num_evicted grew by 0",
        ),
        (HidesBirths, "test_keys_seen_often_enough_have_a_row_each", "were born, each of 8 must be once"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_mistake_fails_with_a_message_that_says_it(mutant: Any, test: str, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        getattr(RowIndexTests(), test)(mutant)
