"""The keys of `fused_params` that TorchRec passes to FBGEMM: each does what it says, or is refused by name."""

from __future__ import annotations

from enum import Enum, IntEnum

import pytest
import torch

from shardwright.errors import InvalidInputError, UnknownNameError, UnsupportedError
from shardwright.planning.tables.spec import DataType
from shardwright.runtime.sharded.collections.sharders import EmbeddingBagCollectionSharder
from shardwright.runtime.step.batches.inputs import InputChecks


class BoundsCheckMode(IntEnum):
    """FBGEMM's, by names and values."""

    FATAL = 0
    WARNING = 1
    IGNORE = 2
    NONE = 3
    V2_FATAL = 6


class SparseType(Enum):
    """FBGEMM's."""

    FP32 = "fp32"
    FP16 = "fp16"


LEVELS = {
    BoundsCheckMode.FATAL: InputChecks.STANDARD,
    BoundsCheckMode.WARNING: InputChecks.WARNING,
    BoundsCheckMode.IGNORE: InputChecks.IGNORE,
    BoundsCheckMode.NONE: InputChecks.OFF,
    BoundsCheckMode.V2_FATAL: InputChecks.STANDARD,
    "warning": InputChecks.WARNING,
    3: InputChecks.OFF,
}


@pytest.mark.parametrize(("mode", "level"), LEVELS.items())
def test_bounds_check_mode_is_a_level_of_input_checks(mode, level):
    sharder = EmbeddingBagCollectionSharder({"bounds_check_mode": mode})
    assert sharder.input_checks is level
    assert sharder.optimizer.parameters == ()


def test_bounds_check_mode_that_contradicts_input_checks_is_an_error():
    EmbeddingBagCollectionSharder({"bounds_check_mode": "NONE"}, input_checks="off")
    with pytest.raises(
        InvalidInputError, match=r"input_checks is 'strict', but .*'NONE', which asks for 'off'"
    ):
        EmbeddingBagCollectionSharder({"bounds_check_mode": "NONE"}, input_checks="strict")


TAKEN = [
    {"output_dtype": DataType.FP32},
    {"output_dtype": SparseType.FP32},
    {"output_dtype": torch.float32},
    {"output_dtype": None},
    {"prefetch_pipeline": True},
    {"cache_reserved_memory": 0.0, "cache_precision": None, "cache_sets": 0, "enforce_hbm": False},
]


@pytest.mark.parametrize("fused_params", TAKEN)
def test_keys_that_ask_for_what_is_done_anyway_are_taken(fused_params):
    sharder = EmbeddingBagCollectionSharder({"optimizer": "adam", **fused_params})
    assert str(sharder.optimizer) == "adam(learning_rate=0.01)"


REFUSED = [
    ({"output_dtype": SparseType.FP16}, UnsupportedError, "lookups give float32.*qcomm_codecs_registry"),
    (
        {"output_dtype": torch.bfloat16},
        UnsupportedError,
        "output_dtype is torch.bfloat16: lookups give float32",
    ),
    ({"cache_reserved_memory": 2.0}, UnsupportedError, "cache_load_factor says"),
    ({"cache_sets": 32}, UnsupportedError, "cache_load_factor says"),
    (
        {"cache_precision": DataType.FP16},
        UnsupportedError,
        "rows in the cache have the table's own data_type",
    ),
    ({"enforce_hbm": True}, UnsupportedError, "optimizer states lie where the compute kernel keeps them"),
    ({"prefetch_pipeline": 3}, InvalidInputError, "must be true or false, got 3"),
    ({"bounds_check_mode": "loud"}, InvalidInputError, "one of FATAL, WARNING, IGNORE, NONE, got 'loud'"),
]


@pytest.mark.parametrize(("fused_params", "error", "text"), REFUSED)
def test_keys_that_ask_for_what_there_is_not_are_refused_by_name(fused_params, error, text):
    (name,) = fused_params
    with pytest.raises(error, match=rf"fused_params\['{name}'\]: .*{text}"):
        EmbeddingBagCollectionSharder(fused_params)


def test_a_key_that_nobody_knows_is_an_error_with_the_known_ones():
    with pytest.raises(
        UnknownNameError, match=r"no parameter 'bounds_check_mod'.*Did you mean 'bounds_check_mode'"
    ):
        EmbeddingBagCollectionSharder({"bounds_check_mod": "NONE"})
