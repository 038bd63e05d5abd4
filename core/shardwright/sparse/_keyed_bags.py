"""The keys of a batch, the sizes of their bags, the checks of both, and their joining.

Legend: F keys, B examples, V values in all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, Self

import torch
from torch import Tensor

from shardwright.contracts.compute_kernel import WEIGHTS
from shardwright.errors import InvalidInputError
from shardwright.sparse import _keyed_validation, _text, _validation, _variable_stride
from shardwright.sparse._jagged import Jagged
from shardwright.sparse._variable_stride import InverseIndices, VariableStride

NAME = "KeyedJaggedTensor"


_NO_VERSION = -1


class KeyedBags(Jagged):
    """Bags of several keys, key after key, and the number of examples and of values of each key.

    Numbers of values are read once, on first use, which waits for a device.
    """

    __slots__ = (
        "_checked_at",
        "_index_per_key",
        "_keys",
        "_length_per_key",
        "_offset_per_key",
        "_stride",
        "_variable",
    )

    _keys: tuple[str, ...]
    _stride: int
    _variable: VariableStride | None
    _index_per_key: dict[str, int] | None
    _length_per_key: list[int] | None
    _offset_per_key: list[int] | None
    _checked_at: tuple[int, int] | None

    def _take_known(
        self,
        length_per_key: Sequence[int] | None,
        offset_per_key: Sequence[int] | None,
        lengths_offset_per_key: Sequence[int] | None,
        index_per_key: Mapping[str, int] | None,
    ) -> None:
        """Take over sizes that the caller knows; those that can be derived without a device must be what is derived."""
        if offset_per_key is not None and length_per_key is None:
            length_per_key = [stop - start for start, stop in pairwise(offset_per_key)]
        if length_per_key is not None and not self._values.is_cpu:
            self._length_per_key = list(length_per_key)
        given: dict[str, tuple[Any, Callable[[], Any]]] = {
            "length_per_key": (length_per_key, self.length_per_key),
            "offset_per_key": (offset_per_key, self.offset_per_key),
            "lengths_offset_per_key": (lengths_offset_per_key, self.lengths_offset_per_key),
            "index_per_key": (index_per_key, self.index_per_key),
        }
        _validation.check_derived(NAME, given)

    def keys(self) -> list[str]:
        """The names of the features, in order."""
        return list(self._keys)

    def index_per_key(self) -> dict[str, int]:
        """The position of each key."""
        return dict(self._key_indices())

    def stride(self) -> int:
        """The number of examples, B; where keys differ and there are no inverse indices, the most of any key."""
        return self._stride

    def stride_per_key(self) -> list[int]:
        """The number of examples of each key."""
        return [self._stride] * len(self._keys) if self._variable is None else list(self._variable.per_key)

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """The number of examples of each key, as each rank brought them; empty if all keys have the same number."""
        return [] if self._variable is None else [list(own) for own in self._variable.per_key_per_rank]

    def variable_stride_per_key(self) -> bool:
        """True if each key has a batch size of its own."""
        return self._variable is not None

    def inverse_indices(self) -> tuple[list[str], Tensor]:
        """The place of each example among each key's own: K keys, and `[K, B]`.

        Raises:
            InvalidInputError: There are none.
        """
        found = self.inverse_indices_or_none()
        if found is None:
            raise InvalidInputError(
                f"{NAME}: it has no inverse indices. Give inverse_indices= when constructing it, or ask "
                "inverse_indices_or_none()."
            )
        return found

    def inverse_indices_or_none(self) -> tuple[list[str], Tensor] | None:
        """The place of each example among each key's own, or None if there are none."""
        inverse = self._inverse
        return None if inverse is None else (list(inverse.keys), inverse.places)

    def lengths_offset_per_key(self) -> list[int]:
        """Start of each key in `lengths()`, and end of the last: F + 1 numbers."""
        return [0, *accumulate(self.stride_per_key())]

    def length_per_key(self) -> list[int]:
        """Number of values of each key; read once from the device, which waits for it, then kept.

        On `meta` there are no lengths to read: the values are taken to fall evenly to the keys, for shapes alone.
        """
        return list(self._counts())

    def length_per_key_or_none(self) -> list[int] | None:
        """Number of values of each key, or None if that has not been read yet."""
        return None if self._length_per_key is None else list(self._length_per_key)

    def offset_per_key(self) -> list[int]:
        """Start of each key in `values()`, and end of the last: F + 1 numbers."""
        return list(self._starts())

    def offset_per_key_or_none(self) -> list[int] | None:
        """Start of each key in `values()`, or None if that has not been read yet."""
        return None if self._length_per_key is None else self.offset_per_key()

    def sync(self) -> Self:
        """Read now how many values each key has, so that nothing later waits for the device."""
        self._counts()
        return self

    def unsync(self) -> Self:
        """Forget how many values each key has."""
        self._length_per_key = self._offset_per_key = None
        return self

    def flatten_lengths(self) -> Self:
        """Return the tensor itself: its lengths are flat already."""
        return self

    def read_counts(
        self, flag_of: Callable[[Tensor], Tensor], read: Callable[[Tensor], Tensor] = torch.Tensor.cpu
    ) -> bool:
        """Read the number of values of each key, and a flag that follows from them, in one copy to the host.

        :meth:`length_per_key` then knows them.

        Args:
            flag_of: function from the numbers, `[F]`, to the flag, one element, on their device.
            read: function that copies a tensor to the host.
        """
        sums = self._sums_by_key()
        *counts, flag = read(torch.cat([sums, flag_of(sums).view(1).to(sums.dtype)])).tolist()
        self._length_per_key = counts
        return bool(flag)

    def validate(self) -> None:
        """Check everything, the contents of lengths or offsets included, wherever they are.

        Raises:
            InvalidInputError: Something is wrong; the text gives the numbers.
        """
        super().validate()
        self._checked_at = self._versions()

    def _check_once(self) -> None:
        """Check the contents on a CPU, which construction has left out, unless that was done and they are as they were.

        Raises:
            InvalidInputError: Lengths or offsets do not fit the values.
        """
        if not self._values.is_cpu or torch.compiler.is_exporting():
            return
        if not self._was_checked():
            self._length_per_key = self._offset_per_key = None
            self._check_content()
            self._checked_at = self._versions()

    def _was_checked(self) -> bool:
        """True if the contents were checked, and are as they were; else what was derived from them is forgotten.

        A loader that fills its tensors again writes lengths or offsets.
        """
        checked = getattr(self, "_checked_at", None)  # batches of TorchScript have none
        if checked is None:
            return False
        lengths, offsets = self._versions()
        if checked[0] not in (_NO_VERSION, lengths):
            self._offsets = None
        elif checked[1] not in (_NO_VERSION, offsets):
            self._lengths = None
        else:
            return True
        self._length_per_key = self._offset_per_key = self._checked_at = None
        return False

    def _versions(self) -> tuple[int, int]:
        """The numbers by which torch counts writes to lengths and to offsets."""
        lengths, offsets = self._lengths, self._offsets
        if torch.compiler.is_compiling():
            return _NO_VERSION, _NO_VERSION
        try:
            return (
                _NO_VERSION if lengths is None else lengths._version,
                _NO_VERSION if offsets is None else offsets._version,
            )
        except RuntimeError:  # made in inference_mode, where torch counts none
            return _NO_VERSION, _NO_VERSION

    def late_problem(self) -> str:
        """The reason why lengths or offsets do not fit the values, on a CPU; empty if they do."""
        try:
            self._check_once()
        except InvalidInputError as error:
            return str(error)
        return ""

    def lookup_problem(self, features: Collection[str], *, num_used: int | None = None) -> str:
        """The reason why tables cannot look some features up, although this is a batch; empty if they can.

        Ids must be integers, a feature must occur once, and no value may be left over.

        Args:
            features: Keys of which each must occur once.
            num_used: Number of values that bags hold, if known.
        """
        if num_used is None and (problem := self.late_problem()):
            return problem
        used = self._starts()[-1] if num_used is None else num_used
        return _keyed_validation.lookup_problem(self._keys, self._values, used, features)

    @property
    def _inverse(self) -> InverseIndices | None:
        return None if self._variable is None else self._variable.inverse

    def _key_indices(self) -> dict[str, int]:
        if self._index_per_key is None:
            self._index_per_key = {key: i for i, key in enumerate(self._keys)}
        return self._index_per_key

    def _counts(self) -> list[int]:
        if self._length_per_key is None:
            self._length_per_key = (
                _keyed_validation.even_counts(len(self._keys), self._values.shape[0])
                if self._values.is_meta
                else self._sums_by_key().tolist()
            )
        return self._length_per_key

    def _starts(self) -> list[int]:
        if self._offset_per_key is None:
            self._offset_per_key = [0, *accumulate(self._counts())]
        return self._offset_per_key

    def _strides(self) -> VariableStride:
        return self._variable or VariableStride(((self._stride,),) * len(self._keys))

    def _bags(self, first: int, end: int) -> slice:
        """Range in `lengths()` of the keys from `first` to before `end`."""
        if self._variable is not None:
            return slice(self._variable.starts[first], self._variable.starts[end])
        return slice(first * self._stride, end * self._stride)

    def _sums_by_key(self) -> Tensor:
        """Number of values of each key: `[F]`."""
        if self._variable is None:
            return self._lengths_by_key().sum(dim=1)
        return self.offsets()[self._variable.starts].diff()

    def _lengths_by_key(self) -> Tensor:
        return self.lengths().view(len(self._keys), self._stride)

    def _num_bags(self) -> int:
        if self._lengths is not None:
            return self._lengths.numel()
        assert self._offsets is not None
        return self._offsets.numel() - 1

    def _check_form(self) -> None:
        _validation.check_vector(NAME, "values", self._values)
        if self._offsets is not None:
            _validation.check_offsets_form(NAME, self._offsets)
        for name, column in self._columns.items():
            _validation.check_column(NAME, name, column, self._values)
        _validation.check_devices(
            NAME,
            self._values,
            **self._columns,
            lengths=self._lengths,
            offsets=self._offsets,
            inverse_indices=None if self._inverse is None else self._inverse.places,
        )

    def _check_content(self) -> None:
        bags = self._lengths, self._offsets, self._values.shape[0]
        _validation.check_bags(NAME, *bags, self._bag_name, others_allowed=True)
        if self._variable is not None:
            _variable_stride.check_places(self._keys, self._variable)

    def _bag_name(self, position: int) -> str:
        if self._variable is not None:
            key = bisect_right(self._variable.starts, position) - 1
            example = position - self._variable.starts[key]
        else:
            key, example = divmod(position, self._stride)
        return f"key {self._keys[key]!r}, example {example}"


def joined_columns(owner: str, names: Sequence[str], parts: Sequence[Jagged]) -> dict[str, Tensor]:
    """The columns of several batches, each joined; all parts have the same columns.

    Raises:
        InvalidInputError: a part lacks a column, or a column has several dtypes.
    """
    joined = {}
    for column in dict.fromkeys(chain.from_iterable(part._columns for part in parts)):
        without = [name for name, part in zip(names, parts, strict=True) if column not in part._columns]
        if without:
            raise InvalidInputError(
                f"{owner}: {len(parts) - len(without)} of {len(parts)} have {column}, but {without[0]} has none. Give "
                f"{column} to all or to none."
            )
        own = [part._columns[column] for part in parts]
        if column != WEIGHTS and len({tensor.dtype for tensor in own}) > 1:
            own = [tensor for tensor in own if tensor.numel()] or own[:1]  # torch.tensor([]) is float32
            if len(dtypes := {_text.dtype_name(tensor) for tensor in own}) > 1:
                raise InvalidInputError(
                    f"{owner}: the column {column!r} is {' and '.join(sorted(dtypes))}: give it one dtype.",
                    subject=column,
                )
        joined[column] = _validation.joined(owner, column, own)
    return joined
