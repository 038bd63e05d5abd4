"""The sparse types in TorchScript.

For TorchScript they are the small classes below, which have the attributes of ours: by these torch converts one into
the other. Where `torch.jit.script` meets one of our types it finds its class here.

All keys of a batch have the same samples: batch sizes per key, and exchanges between ranks, are not in TorchScript.

TorchScript reads annotations, so they are no text here. It looks up what they, and the methods, name in this module.

Legend: F keys, B samples, D columns.
"""

import inspect
import warnings
from typing import TYPE_CHECKING, Any, Optional, TypeVar

import torch
from torch import Tensor
from torch.jit import _state
from torch.nn import functional

from shardwright import JaggedTensor, KeyedJaggedTensor, KeyedTensor

_C = TypeVar("_C", bound=type[Any])


class _JaggedMethods:
    """The methods that both jagged types have."""

    _values: Tensor
    _columns: dict[str, Tensor]
    _lengths: Tensor | None
    _offsets: Tensor | None

    def values(self) -> Tensor:
        """The values of all bags."""
        return self._values

    def weights_or_none(self) -> Tensor | None:
        """The weight of each value, if there are any."""
        return self._columns.get("weights")

    def weights(self) -> Tensor:
        """The weight of each value."""
        assert "weights" in self._columns, "the ids have no weights"
        return self._columns["weights"]

    def columns(self) -> dict[str, Tensor]:
        """The columns beside the values, by name."""
        return self._columns

    def lengths(self) -> Tensor:
        """Number of values in each bag."""
        lengths = self._lengths
        if lengths is None:
            offsets = self._offsets
            assert offsets is not None
            return offsets.diff()
        return lengths

    def lengths_or_none(self) -> Tensor | None:
        """The lengths, if they were given."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Start of each bag, and end of the last."""
        offsets = self._offsets
        if offsets is None:
            lengths = self.lengths()
            return functional.pad(torch.cumsum(lengths, 0, dtype=lengths.dtype), [1, 0])
        return offsets

    def offsets_or_none(self) -> Tensor | None:
        """The offsets, if they were given."""
        return self._offsets

    def device(self) -> torch.device:
        """Device of the values."""
        return self._values.device


def _with_jagged_methods(owner: _C) -> _C:
    """Put the methods of `_JaggedMethods` into a class: classes of TorchScript inherit nothing."""
    for name, method in vars(_JaggedMethods).items():
        if inspect.isfunction(method):
            setattr(owner, name, method)
    return owner


if TYPE_CHECKING:
    _Shared = _JaggedMethods
else:
    _Shared = object


@_with_jagged_methods
class ScriptJaggedTensor(_Shared):
    """`JaggedTensor` in TorchScript."""

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ):
        self._values: Tensor = values
        self._columns = torch.jit.annotate(dict[str, Tensor], {})
        if weights is not None:
            self._columns["weights"] = weights
        self._lengths: Tensor | None = lengths
        self._offsets: Tensor | None = offsets

    def to_dense(self) -> list[Tensor]:
        """Each bag as a tensor of its own."""
        sizes: list[int] = self.lengths().tolist()
        return list(torch.split(self._values, sizes))

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """One row per bag, padded or cut to the same width: ``[B, width]`` or ``[B, width, D]``."""
        values, offsets, lengths = self._values, self.offsets(), self.lengths()
        width = 0
        if desired_length is not None:
            width = desired_length
        elif lengths.numel() > 0:
            width = int(lengths.max())
        column = torch.arange(width, device=values.device).unsqueeze(0)
        is_there = column < lengths.unsqueeze(1)
        # The place behind the last value stands for those that are not there.
        places = torch.where(is_there, offsets[:-1].unsqueeze(1) + column, values.shape[0])
        padding = values.new_full([1] + list(values.shape[1:]), padding_value)  # noqa: RUF005
        return torch.cat([values, padding])[places]


@_with_jagged_methods
class ScriptKeyedJaggedTensor(_Shared):
    """`KeyedJaggedTensor` in TorchScript; all features have the same samples."""

    def __init__(
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        columns: dict[str, Tensor] | None = None,
    ):
        self._keys: list[str] = keys
        self._values: Tensor = values
        self._columns = torch.jit.annotate(dict[str, Tensor], {})
        if weights is not None:
            self._columns["weights"] = weights
        if columns is not None:
            for name, column in columns.items():
                self._columns[name] = column
        self._lengths: Tensor | None = lengths
        self._offsets: Tensor | None = offsets
        self._variable = torch.jit.annotate(Optional[int], None)  # noqa: UP045
        self._index_per_key = torch.jit.annotate(Optional[dict[str, int]], None)  # noqa: UP045
        self._length_per_key = torch.jit.annotate(Optional[list[int]], None)  # noqa: UP045
        self._offset_per_key = torch.jit.annotate(Optional[list[int]], None)  # noqa: UP045
        count = 0
        if lengths is not None:
            count = lengths.numel()
        elif offsets is not None:
            count = offsets.numel() - 1
        if stride is None:
            stride = count // max(len(keys), 1)
        assert stride * len(keys) == count, "each key needs as many lengths as there are samples"
        self._stride: int = stride

    def keys(self) -> list[str]:
        """The features, in order."""
        return self._keys

    def stride(self) -> int:
        """Number of samples."""
        return self._stride

    def stride_per_key(self) -> list[int]:
        """Number of samples of each feature."""
        return [self._stride] * len(self._keys)

    def variable_stride_per_key(self) -> bool:
        """False: all features have the same samples."""
        return False

    def length_per_key(self) -> list[int]:
        """Number of ids of each feature."""
        counts: list[int] = self.lengths().view(len(self._keys), self._stride).sum(1).tolist()
        return counts

    def offset_per_key(self) -> list[int]:
        """Start of each feature in the ids, and end of the last."""
        starts = [0]
        for count in self.length_per_key():
            starts.append(starts[-1] + count)
        return starts

    def split(self, segments: list[int]) -> list["ScriptKeyedJaggedTensor"]:
        """Runs of so many keys each; they add up to all of them."""
        assert sum(segments) == len(self._keys), "the segments do not add up to the number of keys"
        starts = [0]
        for segment in segments:
            assert segment >= 0, "a segment is negative"
            starts.append(starts[-1] + segment)
        return [self.permute(list(range(starts[i], starts[i + 1]))) for i in range(len(segments))]

    def permute(self, indices: list[int]) -> "ScriptKeyedJaggedTensor":
        """The keys in another order, or some of them."""
        counts = self.length_per_key()
        values = torch.split(self._values, counts)
        lengths = self.lengths().view(len(self._keys), self._stride)
        made = ScriptKeyedJaggedTensor(
            [self._keys[index] for index in indices],
            torch.cat([self._values[:0]] + [values[index] for index in indices]),
            None,
            torch.cat([lengths.flatten()[:0]] + [lengths[index] for index in indices]),
            None,
            self._stride,
            None,
        )
        for name, column in self._columns.items():
            own = torch.split(column, counts)
            made._columns[name] = torch.cat([column[:0]] + [own[index] for index in indices])
        return made

    def sync(self) -> "ScriptKeyedJaggedTensor":
        """The batch itself: sizes are read where they are asked for."""
        return self

    def to(self, device: torch.device, non_blocking: bool = False) -> "ScriptKeyedJaggedTensor":
        """The batch on a device."""
        made = ScriptKeyedJaggedTensor(
            self._keys,
            self._values.to(device, non_blocking=non_blocking),
            None,
            self.lengths().to(device, non_blocking=non_blocking),
            None,
            self._stride,
            None,
        )
        for name, column in self._columns.items():
            made._columns[name] = column.to(device, non_blocking=non_blocking)
        return made

    def to_dict(self) -> dict[str, JaggedTensor]:
        """The bags of each feature."""
        lengths = self.lengths().view(len(self._keys), self._stride)
        counts = self.length_per_key()
        values = torch.split(self._values, counts)
        found: dict[str, JaggedTensor] = {}
        for index, key in enumerate(self._keys):
            bags = JaggedTensor(values[index], None, lengths[index])
            for name, column in self._columns.items():
                bags._columns[name] = torch.split(column, counts)[index]
            found[key] = bags
        return found

    def __getitem__(self, key: str) -> JaggedTensor:
        """The bags of a feature."""
        return self.to_dict()[key]


class ScriptKeyedTensor:
    """`KeyedTensor` in TorchScript."""

    def __init__(self, keys: list[str], length_per_key: list[int], values: Tensor, key_dim: int = 1):
        self._keys: list[str] = keys
        self._length_per_key: list[int] = length_per_key
        self._values: Tensor = values
        self._key_dim: int = key_dim
        self._offset_per_key = torch.jit.annotate(Optional[list[int]], None)  # noqa: UP045
        self._index_per_key = torch.jit.annotate(Optional[dict[str, int]], None)  # noqa: UP045

    def keys(self) -> list[str]:
        """The names, in order."""
        return self._keys

    def length_per_key(self) -> list[int]:
        """Columns of each."""
        return self._length_per_key

    def values(self) -> Tensor:
        """All columns."""
        return self._values

    def offset_per_key(self) -> list[int]:
        """First column of each, and end of the last."""
        starts = [0]
        for length in self._length_per_key:
            starts.append(starts[-1] + length)
        return starts

    def key_dim(self) -> int:
        """Dimension along which the keys lie."""
        return self._key_dim

    def device(self) -> torch.device:
        """Device of the values."""
        return self._values.device

    def to_dict(self) -> dict[str, Tensor]:
        """The tensor of each name."""
        parts = torch.split(self._values, self._length_per_key, self._key_dim)
        found: dict[str, Tensor] = {}
        for index, key in enumerate(self._keys):
            found[key] = parts[index]
        return found

    def __getitem__(self, key: str) -> Tensor:
        """The tensor of a name."""
        return self.to_dict()[key]


_registered: list[type] = []


def register_script_types() -> None:
    """Have TorchScript take our sparse types for the classes here, and give them back as ours.

    Programs that have them in inputs or results are scripted, and loaded, in processes that did this.
    """
    pairs: dict[type[Any], Any] = {
        JaggedTensor: ScriptJaggedTensor,
        KeyedJaggedTensor: ScriptKeyedJaggedTensor,
        KeyedTensor: ScriptKeyedTensor,
    }
    if _registered:
        return
    _registered.extend(pairs)  # first: torch asks again while it compiles
    for ours, script in pairs.items():
        # The class has the name of ours there, which code that constructs one of ours looks up.
        name = torch._jit_internal._qualified_name(ours)
        script._jit_override_qualname = name
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # torch's, that TorchScript is deprecated: it is said of the user's code
            torch.jit.script(script)
        _state._add_script_class(ours, _state._script_classes[script])
        _state._name_to_pyclass[name] = ours
