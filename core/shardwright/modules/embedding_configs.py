"""The tables' configurations under TorchRec's module path, and their data types in torch's terms.

Importing this does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.errors import InvalidInputError
from shardwright.planning.tables.spec import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType

if TYPE_CHECKING:
    import torch

__all__ = ["DataType", "EmbeddingBagConfig", "EmbeddingConfig", "PoolingType", "data_type_of", "dtype_of"]


def dtype_of(data_type: DataType) -> torch.dtype:
    """The torch dtype of weights of a data type.

    Raises:
        InvalidInputError: torch cannot train that type.
    """
    import torch

    dtype = getattr(torch, data_type.torch_name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def data_type_of(dtype: torch.dtype) -> DataType:
    """The data type of weights of a torch dtype: the reverse of `dtype_of`.

    Raises:
        InvalidInputError: no trainable data type has that dtype.
    """
    import torch

    known = {getattr(torch, torch_name): name for name, torch_name in _trainable().items()}
    if dtype not in known:
        raise InvalidInputError(f"no table has weights of {dtype}; possible: {', '.join(map(str, known))}")
    return DataType(known[dtype])


def _trainable() -> dict[str, str]:
    names = {}
    for data_type in DataType:
        try:
            names[data_type.value] = data_type.torch_name
        except InvalidInputError:
            continue
    return names
