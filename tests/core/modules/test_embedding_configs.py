from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from shardwright.errors import InvalidInputError
from shardwright.modules.embedding_configs import DataType, dtype_of

TRAINABLE = {
    DataType.FP32: torch.float32,
    DataType.FP16: torch.float16,
    DataType.BF16: torch.bfloat16,
}


@pytest.mark.parametrize("data_type", TRAINABLE)
def test_dtype_of_trainable_type_is_torchs(data_type: DataType) -> None:
    assert dtype_of(data_type) is TRAINABLE[data_type]


def test_dtype_of_another_type_names_those_that_train_and_the_nearest() -> None:
    with pytest.raises(
        InvalidInputError, match=r"FP61 is no type that torch trains: FP32, FP16, BF16\. Did you mean 'FP16'"
    ):
        dtype_of(DataType("FP61"))


def test_embedding_configs_import_leaves_torch_out() -> None:
    code = "import sys, shardwright.modules.embedding_configs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
