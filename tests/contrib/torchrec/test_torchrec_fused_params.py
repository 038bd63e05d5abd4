"""Keys of `fused_params` that TorchRec passes to FBGEMM: each does what it says, or is refused by name."""

from __future__ import annotations

from enum import Enum, IntEnum

import pytest
import torch
from shardwright_torchrec.parallel.sharders import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder

from shardwright import DataType, InvalidInputError, UnsupportedError
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
        "is torch.bfloat16: lookups give float32",
    ),
    ({"cache_reserved_memory": 2.0}, UnsupportedError, "cache_load_factor says"),
    ({"cache_sets": 32}, UnsupportedError, "cache_load_factor says"),
    (
        {"cache_precision": DataType.FP16},
        UnsupportedError,
        "rows in the cache have the table's own data_type",
    ),
    ({"enforce_hbm": True}, UnsupportedError, "optimizer states lie where the compute kernel keeps them"),
    ({"bounds_check_mode": "loud"}, InvalidInputError, "one of FATAL, WARNING, IGNORE, NONE, got 'loud'"),
]


@pytest.mark.parametrize(("fused_params", "error", "text"), REFUSED)
def test_keys_that_ask_for_what_there_is_not_are_refused_by_name(fused_params, error, text):
    (name,) = fused_params
    with pytest.raises(error, match=rf"{name}.*{text}"):
        EmbeddingBagCollectionSharder(fused_params)


class EmbOptimType(Enum):
    """FBGEMM's names and values (split_embedding_configs.py, 1.8.0)."""

    SGD = "sgd"
    EXACT_SGD = "exact_sgd"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    ROWWISE_ADAGRAD = "row_wise_adagrad"
    PARTIAL_ROWWISE_ADAM = "partial_row_wise_adam"
    LARS_SGD = "lars_sgd"


OPTIMIZERS = {
    EmbOptimType.SGD: "sgd",
    EmbOptimType.EXACT_SGD: "sgd",
    EmbOptimType.EXACT_ADAGRAD: "adagrad",
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: "row_wise_adagrad",
    EmbOptimType.ROWWISE_ADAGRAD: "row_wise_adagrad",
    EmbOptimType.PARTIAL_ROWWISE_ADAM: "partial_row_wise_adam",
    EmbOptimType.LARS_SGD: "lars",
    "rowwise_adagrad": "row_wise_adagrad",
    "Exact_SGD": "sgd",
    "acme_shampoo": "acme_shampoo",
}


@pytest.mark.parametrize("sharder", [EmbeddingBagCollectionSharder, EmbeddingCollectionSharder])
@pytest.mark.parametrize(("optimizer", "name"), OPTIMIZERS.items())
def test_optimizers_have_fbgemms_names_too(sharder, optimizer, name):
    assert sharder({"optimizer": optimizer}).optimizer.name == name


class WeightDecayMode(Enum):
    """FBGEMM's."""

    L2 = 1


def test_members_of_enumerations_are_their_names():
    sharder = EmbeddingBagCollectionSharder({"optimizer": "sgd", "weight_decay_mode": WeightDecayMode.L2})
    assert sharder.optimizer.get("weight_decay_mode", None) == "l2"
