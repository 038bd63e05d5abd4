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

__all__ = ["DataType", "EmbeddingBagConfig", "EmbeddingConfig", "PoolingType", "data_type_of", "dtype_of"]


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


def data_type_of(dtype: torch.dtype) -> DataType:
    """The data type of weights of a torch dtype: the reverse of `dtype_of`.

    Raises:
        InvalidInputError: no trainable data type has that dtype.
    """
    import torch

    known = {getattr(torch, torch_name): name for name, torch_name in TORCH_NAMES.items()}
    if dtype not in known:
        raise InvalidInputError(f"no table has weights of {dtype}; possible: {', '.join(map(str, known))}")
    return DataType(known[dtype])
