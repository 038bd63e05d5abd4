"""Pooled results in groups of features.

TorchScript and `torch.fx` read annotations, so they are no text here.
"""

from torch import Tensor, nn

import shardwright as sw
from shardwright_torchrec.modules.embedding_configs import data_type_to_dtype


class KTRegroupAsDict(nn.Module):
    """Joins columns of keyed tensors to groups, each with a name.

    Args:
        groups: names of features, group by group.
        keys: name of each group.
        emb_dtype: dtype of the groups, as a `DataType`; that of the tensors by default.
        multi_device: not needed.

    Raises:
        InvalidInputError: there are not as many names as groups.
    """

    def __init__(
        self,
        groups: list[list[str]],
        keys: list[str],
        emb_dtype: sw.DataType | None = None,
        multi_device: bool = False,
    ) -> None:
        super().__init__()
        if len(groups) != len(keys):
            raise sw.InvalidInputError(f"{len(groups)} groups need as many keys, got {len(keys)}")
        self._groups, self._keys = groups, keys
        self._dtype = None if emb_dtype is None else data_type_to_dtype(emb_dtype)

    def forward(self, keyed_tensors: list[sw.KeyedTensor]) -> dict[str, Tensor]:
        """The groups by name, ``[B, columns of their features]`` each."""
        grouped: dict[str, Tensor] = sw.KeyedTensor.regroup_as_dict(keyed_tensors, self._groups, self._keys)
        if self._dtype is None:
            return grouped
        return {name: value.to(self._dtype) for name, value in grouped.items()}
