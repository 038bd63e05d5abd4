"""The tables' configurations under TorchRec's module path, and their data types in torch's terms.

Importing this does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.errors import InvalidInputError, nearest
from shardwright.planning.tables.data_types import TORCH_NAMES, DataType
from shardwright.planning.tables.spec import EmbeddingBagConfig, EmbeddingConfig, PoolingType

if TYPE_CHECKING:
    import torch

__all__ = ["DataType", "EmbeddingBagConfig", "EmbeddingConfig", "PoolingType", "dtype_of"]


def dtype_of(data_type: DataType) -> torch.dtype:
    """The torch dtype of weights of a data type.

    Raises:
        InvalidInputError: torch cannot train that type.
    """
    import torch

    if data_type not in TORCH_NAMES:
        raise InvalidInputError(
            f"{data_type} is no type that torch trains: {', '.join(TORCH_NAMES)}.{nearest(data_type, TORCH_NAMES)}"
        )
    dtype = getattr(torch, TORCH_NAMES[data_type])
    assert isinstance(dtype, torch.dtype)
    return dtype
