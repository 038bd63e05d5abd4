"""`KeyedJaggedTensor`: a batch of several features, each with bags of different lengths."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, Self, final

import torch
from torch import Tensor

from shardwright.arguments import checked
from shardwright.contracts.compute_kernel import WEIGHTS
from shardwright.error_reports import reporting_errors
from shardwright.errors import InvalidInputError
from shardwright.sparse import (
    _foreign,
    _keyed_validation,
    _ops,
    _text,
    _tree,
    _validation,
    _variable_stride,
)
from shardwright.sparse._jagged import Jagged, named
from shardwright.sparse._variable_stride import InverseIndices, VariableStride
from shardwright.sparse.jagged_tensor import JaggedTensor

_NAME = "KeyedJaggedTensor"
_NOT_KNOWN = (None,) * 4


@final
class KeyedJaggedTensor(Jagged):
    """The ids of several features for one batch: for each key a bag of ids per example.

    Values, lengths and offsets hold the keys one after the other, and within a key the examples:

        #              0       1        2  <- example
        # "product"    [V0,V1] []       [V2]
        # "user"       [V3]    [V4]     [V5,V6,V7]

        values  [V0, V1, V2, V3, V4, V5, V6, V7]
        lengths [2, 0, 1, 1, 1, 3]
        offsets [0, 2, 2, 3, 4, 5, 8]

    NumPy arrays are taken as well as tensors; `from_lists` takes nested lists.

    It holds what TorchRec's holds: values of any number type, a key several times (`kjt[key]` is the last), values
    beyond those of the bags. Lookups in tables refuse such batches: they want integers, each feature once, and no value
    left over.

    Legend: F keys, B examples (`stride`), V values in all.

    Args:
        keys: F names.
        values: `[V]`; ids are int32 or int64.
        weights: `[V]`, numbers: the column of that name.
        lengths: How many ids each bag holds: `[F * B]` (or `[F, B]`), int32 or int64.
        offsets: Where each bag starts, and where the last ends: `[F * B + 1]`. Instead of lengths, or beside them.
        stride: B; needed only where it cannot be derived (F = 0), checked otherwise.
        stride_per_key_per_rank: Batch sizes that differ between keys: for each key B_f, as a list of the numbers that
            each rank brought (`[B_f]` where nothing was exchanged). Their sum is the number of lengths.
        stride_per_key: For each key B_f, instead of the former.
        length_per_key: For each key its number of values, if known: on a device it need not be read then.
        lengths_offset_per_key: Start of each key in the lengths, and end of the last; compared with what follows.
        offset_per_key: Start of each key in the values, and end of the last; compared with what follows.
        index_per_key: Position of each key; compared with what follows.
        jt_dict: Not used, since it is derived; it exists because TorchRec has it.
        inverse_indices: K keys, and `[K, B]`: the place of each example of the whole batch among each key's own. With
            it a pooled lookup gives B examples.
        columns: Further numbers of each id by name, as counts or timestamps: `[V]` each, int64 or float32. A table's
            compute kernel gets those that it asks for (`ComputeKernel.columns`).

    Raises:
        InvalidInputError: Neither lengths nor offsets are given; a dtype, shape or device does not fit. That lengths
            are negative, add up to more than V or contradict the offsets is an error where the batch is first looked
            up or parted, which names rank and table, and of `validate()`.

    Example:
        >>> batch = KeyedJaggedTensor(
        ...     keys=["product", "user"],
        ...     values=torch.tensor([1, 2, 1, 5, 2, 3, 4, 1]),
        ...     lengths=torch.tensor([3, 1, 2, 2]),
        ... )
        >>> print(batch)
        KeyedJaggedTensor({
            "product": [[1, 2, 1], [5]],
            "user": [[2, 3], [4, 1]]
        })
        >>> batch["user"].lengths()
        tensor([2, 2])
    """

    __slots__ = (
        "_index_per_key",
        "_is_checked",
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
    _is_checked: bool

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | Tensor | None = None,
        stride_per_key: Sequence[int] | None = None,
        length_per_key: Sequence[int] | None = None,
        lengths_offset_per_key: Sequence[int] | None = None,
        offset_per_key: Sequence[int] | None = None,
        index_per_key: Mapping[str, int] | None = None,
        jt_dict: Mapping[str, JaggedTensor] | None = None,
        inverse_indices: tuple[Sequence[str], Tensor] | None = None,
        columns: Mapping[str, Tensor] | None = None,
    ) -> None:
        with reporting_errors():  # the ranks that will wait for this batch
            _validation.check_one_of_lengths_offsets(_NAME, lengths, offsets)
            values, weights, lengths, offsets = _foreign.as_tensors(
                _NAME, values=values, weights=weights, lengths=lengths, offsets=offsets
            )
            self._index_per_key = _validation.check_keys(_NAME, keys, distinct=False)
            self._keys = tuple(keys)
            self._values = _keyed_validation.as_values(_NAME, values)
            self._columns = _foreign.as_columns(_NAME, weights, columns)
            self._lengths = None if lengths is None else _keyed_validation.flat_lengths(lengths, len(keys))
            self._offsets = None if offsets is None else _validation.as_indices(_NAME, "offsets", offsets)
            self._is_checked = False
            self._length_per_key = self._offset_per_key = None
            self._variable = _variable_stride.read(
                self._keys, self._num_bags(), stride_per_key_per_rank, stride_per_key, inverse_indices
            )
            self._check_form()
            self._stride = self._derived_stride(stride)
            if (length_per_key, offset_per_key, lengths_offset_per_key, index_per_key) != _NOT_KNOWN:
                self._take_known(
                    length_per_key=length_per_key,
                    offset_per_key=offset_per_key,
                    lengths_offset_per_key=lengths_offset_per_key,
                    index_per_key=index_per_key,
                )

    def _take_known(
        self,
        *,
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
        _validation.check_derived(_NAME, given)

    @classmethod
    def _trusted(
        cls,
        keys: tuple[str, ...],
        values: Tensor,
        stride: int,
        *,
        columns: dict[str, Tensor] | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        length_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
        variable: VariableStride | None = None,
        is_checked: bool = True,
    ) -> Self:
        """Construct from data known to fit, without a check: what the engine does in every step.

        Args:
            keys: F distinct names.
            values: `[V]`.
            stride: B.
            columns: `[V]` each.
            lengths: `[F * B]`; these, offsets, or both.
            offsets: `[F * B + 1]`.
            length_per_key: How many values each key has, if known: reading it from a device waits for it.
            index_per_key: The position of each key, if at hand.
            variable: Batch size of each key, where they differ.
            is_checked: The contents of lengths or offsets are known to fit, too.
        """
        self = cls.__new__(cls)
        self._keys, self._stride, self._variable = keys, stride, variable
        self._values, self._columns, self._lengths, self._offsets = values, columns or {}, lengths, offsets
        self._length_per_key, self._index_per_key = length_per_key, index_per_key
        self._offset_per_key, self._is_checked = None, is_checked
        return self

    @staticmethod
    def from_lengths_sync(
        keys: Sequence[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | Tensor | None = None,
        inverse_indices: tuple[Sequence[str], Tensor] | None = None,
        columns: Mapping[str, Tensor] | None = None,
    ) -> KeyedJaggedTensor:
        """Construct from lengths, and read at once how many values each key has (see `sync`).

        The arguments and errors are those of the constructor.
        """
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            lengths,
            None,
            stride,
            stride_per_key_per_rank,
            inverse_indices=inverse_indices,
            columns=columns,
        ).sync()

    @staticmethod
    def from_offsets_sync(
        keys: Sequence[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | Tensor | None = None,
        inverse_indices: tuple[Sequence[str], Tensor] | None = None,
        columns: Mapping[str, Tensor] | None = None,
    ) -> KeyedJaggedTensor:
        """Construct from offsets, and read at once how many values each key has (see `sync`).

        The arguments and errors are those of the constructor.
        """
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            None,
            offsets,
            stride,
            stride_per_key_per_rank,
            inverse_indices=inverse_indices,
            columns=columns,
        ).sync()

    @staticmethod
    def from_lists(
        lists: Mapping[str, Any],
        weights: Mapping[str, Any] | None = None,
        columns: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> KeyedJaggedTensor:
        """Construct from the ids of each example, as nested lists or the columns of a pandas `DataFrame`.

        Args:
            lists: For each key a bag per example: a list or array of ids, a single id, or None for an empty bag. An
                array `[B]` or `[B, n]` has 1 or n ids of each example.
            weights: Likewise, a weight per id; all keys have some, or none.
            columns: Further numbers of each id by name, each column like weights: int64 where all its numbers are
                integers, else float32.

        Returns:
            A `KeyedJaggedTensor` on the CPU, with int64 values, int32 lengths and float32 weights.

        Raises:
            InvalidInputError: Keys differ in their number of examples, something is no integer, or weights or columns
                do not fit; names key and example.

        Example:
            >>> print(KeyedJaggedTensor.from_lists({"user": [7, 8, 9], "seen": [[4, 5], None, [6]]}))
            KeyedJaggedTensor({
                "user": [[7], [8], [9]],
                "seen": [[4, 5], [], [6]]
            })
        """
        owner = f"{_NAME}.from_lists"
        with reporting_errors():
            ids = _foreign.columns_of_lists(owner, lists)
            beside = _foreign.beside_lists(owner, weights, columns)
            if not ids:
                return KeyedJaggedTensor.empty(is_weighted=WEIGHTS in beside)
            return KeyedJaggedTensor(list(ids), **_foreign.joined(owner, ids, beside)).sync()

    @staticmethod
    @checked
    def from_jt_dict(
        jt_dict: Mapping[str, JaggedTensor], force_variable_stride: bool = False
    ) -> KeyedJaggedTensor:
        """Join a `JaggedTensor` per key; all must have the same number of bags.

        An example that lacks a feature needs an empty bag there: bags are matched by position.

        Args:
            jt_dict: The ids of each feature, in the order of the keys.
            force_variable_stride: Each key gets a batch size of its own, its number of bags; they may differ.

        Returns:
            A `KeyedJaggedTensor`; of an empty mapping, one of no keys.

        Raises:
            InvalidInputError: The numbers of bags differ, or some have weights and some have none.
        """
        if not jt_dict:
            return KeyedJaggedTensor.empty()
        owner = f"{_NAME}.from_jt_dict"
        parts = list(jt_dict.values())
        names = [f"key {key!r}" for key in jt_dict]
        lengths = [part.lengths() for part in parts]
        strides = [part.numel() for part in lengths]
        if not force_variable_stride:
            _keyed_validation.check_same_stride(owner, names, strides)
        return KeyedJaggedTensor(
            keys=list(jt_dict),
            values=_validation.joined(
                owner, "values", [_keyed_validation.as_values(owner, part.values()) for part in parts]
            ),
            lengths=torch.cat(lengths),
            columns=_concatenate_columns(owner, names, parts),
            stride_per_key_per_rank=[[stride] for stride in strides] if force_variable_stride else None,
        ).sync()

    @staticmethod
    @checked
    def concat(kjt_list: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """Join the keys of several batches of the same examples.

        Args:
            kjt_list: One or more, with distinct keys, of the same stride unless one has a batch size per key.

        Returns:
            A `KeyedJaggedTensor` with the keys of the first, then those of the second, and so on.

        Raises:
            InvalidInputError: The list is empty, strides differ, or some have weights and some have none.
            DuplicateNameError: Two of them have the same key.
        """
        owner = f"{_NAME}.concat"
        if not kjt_list:
            raise InvalidInputError(f"{owner}: got a list of 0; {_NAME}.empty() makes one without keys.")
        names = [f"part {i}" for i in range(len(kjt_list))]
        for name, part in zip(names, kjt_list, strict=True):
            if problem := part.late_problem():
                raise InvalidInputError(f"{owner}: {name}: {problem}", subject=name)
        variable = _joined_strides(owner, kjt_list)
        if variable is None:
            _keyed_validation.check_same_stride(owner, names, [part.stride() for part in kjt_list])
        keys = tuple(key for part in kjt_list for key in part._keys)
        counts, used = [part._length_per_key for part in kjt_list], [part._used() for part in kjt_list]
        return KeyedJaggedTensor._trusted(
            keys,
            _validation.joined(owner, "values", [part._values for part in used]),
            kjt_list[0].stride() if variable is None else variable.stride,
            columns=_concatenate_columns(owner, names, used),
            lengths=torch.cat([part.lengths() for part in kjt_list]),
            length_per_key=_joined(counts),
            index_per_key=_validation.check_keys(owner, keys),
            variable=variable,
        )

    @staticmethod
    @checked
    def empty(
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> KeyedJaggedTensor:
        """A batch of no keys and no examples.

        Args:
            is_weighted: Whether it has (no) weights.
            device: Where; by default torch's default device.
            values_dtype: int32 or, by default, int64.
            weights_dtype: By default torch's default dtype.
            lengths_dtype: int32 or int64.

        Returns:
            A `KeyedJaggedTensor` with F = 0, B = 0 and V = 0.
        """
        return KeyedJaggedTensor(
            keys=[],
            values=torch.empty(0, dtype=values_dtype or torch.int64, device=device),
            weights=torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            lengths=torch.empty(0, dtype=lengths_dtype, device=device),
        )

    @staticmethod
    @checked
    def empty_like(kjt: KeyedJaggedTensor, device: torch.device | str | None = None) -> KeyedJaggedTensor:
        """A batch of no keys, with the stride, dtypes and device of another.

        Args:
            kjt: The other.
            device: Where, instead of the other's device.

        Returns:
            A `KeyedJaggedTensor` with F = 0, the other's B, and V = 0.
        """
        return KeyedJaggedTensor._trusted(
            (),
            kjt._values.new_empty(0, device=device),
            kjt._stride,
            columns={name: column.new_empty(0, device=device) for name, column in kjt._columns.items()},
            lengths=kjt.lengths().new_empty(0, device=device),
            length_per_key=[],
        )

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
        if self._variable is not None:
            return list(self._variable.per_key)
        return [self._stride] * len(self._keys)

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
                f"{_NAME}: it has no inverse indices. Give inverse_indices= when constructing it, or ask "
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

    def flatten_lengths(self) -> KeyedJaggedTensor:
        """Return the tensor itself: its lengths are flat already."""
        return self

    @checked
    def split(self, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
        """Part the keys into runs; the tensors of the parts are views.

        Args:
            segments: How many keys each part gets; they add up to F. A part may have none.

        Returns:
            One `KeyedJaggedTensor` per segment, of the same stride.

        Raises:
            InvalidInputError: A segment is negative, or they do not add up to F.
        """
        _keyed_validation.check_segments(segments, len(self._keys))
        bounds = [0, *accumulate(segments)]
        return [self._run(start, end) for start, end in pairwise(bounds)]

    @checked
    def permute(self, indices: Sequence[int], indices_tensor: Tensor | None = None) -> KeyedJaggedTensor:
        """Put the keys in another order, or select some.

        Args:
            indices: The old position of each new key; a key may be taken several times.
            indices_tensor: The same as an int32 tensor on the device of the values: spares copying it there.

        Returns:
            A new `KeyedJaggedTensor`.

        Raises:
            InvalidInputError: A position is out of range.
        """
        _keyed_validation.check_permutation(indices, len(self._keys), indices_tensor)
        counts = self._counts()
        lengths, values, columns = self._permuted(indices, indices_tensor)
        return self._trusted(
            tuple(self._keys[i] for i in indices),
            values,
            self._stride,
            columns=columns,
            lengths=lengths,
            length_per_key=[counts[i] for i in indices],
            variable=self._variable and self._variable.chosen(indices),
        )

    def _permuted(
        self, indices: Sequence[int], indices_tensor: Tensor | None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Lengths, values and columns with the keys in another order."""
        counts, used, weights = self._counts(), self._used(), None
        values, columns = used._values, used._columns
        if self._variable is not None:
            lengths = _ops.permute_runs(self.lengths(), indices, self._variable.per_key)
            values = _ops.permute_runs(values, indices, counts)
        else:
            lengths, values, weights = _ops.permute_keys(
                indices, self._lengths_by_key(), values, columns.get(WEIGHTS), counts, indices_tensor
            )
        others = {
            name: _ops.permute_runs(column, indices, counts)
            for name, column in columns.items()
            if name != WEIGHTS or weights is None
        }
        return lengths.flatten(), values, {**named(weights), **others}

    def validate(self) -> None:
        """Check everything, the contents of lengths or offsets included, wherever they are.

        Raises:
            InvalidInputError: Something is wrong; the text gives the numbers.
        """
        super().validate()
        self._is_checked = True

    def _check_once(self) -> None:
        """Check the contents on a CPU, which construction has left out, unless that was done.

        Raises:
            InvalidInputError: Lengths or offsets do not fit the values.
        """
        if not self._was_checked and self._values.is_cpu and not torch.compiler.is_exporting():
            self._check_content()
            self._is_checked = True

    @property
    def _was_checked(self) -> bool:
        return getattr(self, "_is_checked", False)  # TorchScript's batches have no such attribute

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

    def __getitem__(self, key: str) -> JaggedTensor:
        """The bags of one feature; its tensors are views.

        Raises:
            UnknownNameError: There is no such key.
        """
        position = self._key_indices().get(key) if isinstance(key, str) else None
        if position is None:
            raise _validation.unknown_key(_NAME, key, self._keys)
        return self._run(position, position + 1)._only()

    @checked
    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """The bags of each feature; their tensors are views.

        Args:
            compute_offsets: Derive the offsets of all in one operation, instead of each on its first use.

        Returns:
            A `JaggedTensor` for each key, in order.
        """
        counts = self._counts()
        if self._variable is not None:
            return {key: self._run(i, i + 1)._only() for i, key in enumerate(self._keys)}
        lengths = self._lengths_by_key()
        used = self._used()
        offsets = (
            _ops.offsets_from_lengths(lengths, self._values.shape[0]).unbind()
            if compute_offsets
            else [None] * len(counts)
        )
        split = {name: column.split(counts) for name, column in used._columns.items()}
        parts = zip(
            used._values.split(counts),
            [{name: own[i] for name, own in split.items()} for i in range(len(counts))],
            lengths.unbind(),
            offsets,
            strict=True,
        )
        return {key: JaggedTensor._trusted(*part) for key, part in zip(self._keys, parts, strict=True)}

    def __str__(self) -> str:
        return _text.braces(_NAME, (self._entry(i) for i in range(len(self._keys))), len(self._keys))

    def __repr__(self) -> str:
        return (
            f"{_NAME}(keys={_text.keys(self._keys)}, stride={self._stride}, values={self._values.shape[0]}, "
            f"{self._described()})"
        )

    def _with_tensors(
        self, values: Tensor, columns: dict[str, Tensor], lengths: Tensor | None, offsets: Tensor | None
    ) -> Self:
        return self._trusted(
            self._keys,
            values,
            self._stride,
            columns=columns,
            lengths=lengths,
            offsets=offsets,
            length_per_key=self._length_per_key,
            index_per_key=self._index_per_key,
            variable=self._variable,
            is_checked=self._was_checked,
        )

    def _map(self, function: Callable[[Tensor], Any]) -> Self:
        mapped = super()._map(function)
        mapped._variable = self._variable and self._variable.mapped(function)
        return mapped

    def _tensors(self) -> Iterator[Tensor]:
        yield from super()._tensors()
        if self._inverse is not None:
            yield self._inverse.places

    @property
    def _inverse(self) -> InverseIndices | None:
        return None if self._variable is None else self._variable.inverse

    def _key_indices(self) -> dict[str, int]:
        if self._index_per_key is None:
            self._index_per_key = {key: i for i, key in enumerate(self._keys)}
        return self._index_per_key

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

    def _used(self) -> KeyedJaggedTensor:
        """The batch without values beyond its bags."""
        self._check_once()
        stop = self._starts()[-1]
        if (
            torch.compiler.is_exporting()
        ):  # numbers are not known yet: the program will demand it of every batch
            torch._check(stop == self._values.shape[0])
        return self if stop == self._values.shape[0] else self._run(0, len(self._keys))

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

    def _derived_stride(self, stride: int | None) -> int:
        """B; one that was given must fit."""
        if self._variable is None:
            return _keyed_validation.derive_stride(len(self._keys), self._num_bags(), stride)
        if stride is not None and stride != self._variable.stride:
            raise InvalidInputError(
                f"{_NAME}: got a stride of {stride}, but the batch sizes of its keys are {self._variable.per_key} and "
                f"the whole batch has {self._variable.stride} examples. Leave stride out."
            )
        return self._variable.stride

    def _num_bags(self) -> int:
        if self._lengths is not None:
            return self._lengths.numel()
        assert self._offsets is not None
        return self._offsets.numel() - 1

    def _run(self, first: int, end: int) -> KeyedJaggedTensor:
        """The keys from `first` to before `end`."""
        self._check_once()
        starts = self._starts()
        run = slice(starts[first], starts[end])
        return self._trusted(
            self._keys[first:end],
            self._values[run],
            self._stride,
            columns={name: column[run] for name, column in self._columns.items()},
            lengths=self.lengths()[self._bags(first, end)],
            length_per_key=self._counts()[first:end],
            variable=self._variable and self._variable.chosen(range(first, end)),
        )

    def _only(self) -> JaggedTensor:
        """The bags of the only key."""
        return JaggedTensor._trusted(self._values, self._columns, self._lengths, self._offsets)

    def _entry(self, position: int) -> str:
        bags = self._bags(position, position + 1)
        offsets = self.offsets()[bags.start : bags.stop + 1]
        if not self._columns:
            return f'"{self._keys[position]}": {_text.bags(self._values, offsets)}'
        columns = {"values": self._values, **self._columns}
        inner = ",\n        ".join(f'"{name}": {_text.bags(own, offsets)}' for name, own in columns.items())
        return f'"{self._keys[position]}": {{\n        {inner}\n    }}'

    def _check_form(self) -> None:
        _validation.check_vector(_NAME, "values", self._values)
        if self._offsets is not None:
            _validation.check_offsets_form(_NAME, self._offsets)
        for name, column in self._columns.items():
            _validation.check_column(_NAME, name, column, self._values)
        _validation.check_devices(
            _NAME,
            self._values,
            **self._columns,
            lengths=self._lengths,
            offsets=self._offsets,
            inverse_indices=None if self._inverse is None else self._inverse.places,
        )

    def _check_content(self) -> None:
        bags = self._lengths, self._offsets, self._values.shape[0]
        _validation.check_bags(_NAME, *bags, self._bag_name, others_allowed=True)
        if self._variable is not None:
            _variable_stride.check_places(self._keys, self._variable)

    def _bag_name(self, position: int) -> str:
        if self._variable is not None:
            key = bisect_right(self._variable.starts, position) - 1
            example = position - self._variable.starts[key]
        else:
            key, example = divmod(position, self._stride)
        return f"key {self._keys[key]!r}, example {example}"


def _concatenate_columns(owner: str, names: Sequence[str], parts: Sequence[Jagged]) -> dict[str, Tensor]:
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


def _joined_strides(owner: str, parts: Sequence[KeyedJaggedTensor]) -> VariableStride | None:
    """The batch sizes of all keys; None if no part has a batch size per key."""
    if not any(part.variable_stride_per_key() for part in parts):
        return None
    return _variable_stride.joined(owner, [(part._keys, part._strides()) for part in parts])


def _joined(lists: Sequence[list[int] | None]) -> list[int] | None:
    if any(part is None for part in lists):
        return None
    return [number for part in lists if part is not None for number in part]


def _leaves(kjt: KeyedJaggedTensor) -> list[Tensor]:
    inverse = kjt._inverse
    return kjt._leaves() if inverse is None else [*kjt._leaves(), inverse.places]


def _context(kjt: KeyedJaggedTensor) -> list[Any]:
    context: list[Any] = [kjt.keys(), kjt.stride(), list(kjt._columns)]
    if kjt._variable is not None:
        inverse = kjt._inverse
        context += [kjt.stride_per_key_per_rank(), None if inverse is None else list(inverse.keys)]
    return context


def _unflatten(leaves: Any, context: list[Any]) -> KeyedJaggedTensor:
    values, lengths, *others = leaves
    keys, stride, columns, *sizes = context
    variable = None
    if sizes:
        numbers, inverse_keys = sizes
        inverse = None if inverse_keys is None else InverseIndices(tuple(inverse_keys), others[-1])
        variable = VariableStride(tuple(map(tuple, numbers)), inverse)
    return KeyedJaggedTensor._trusted(
        tuple(keys),
        values,
        stride,
        columns=dict(zip(columns, others, strict=False)),
        lengths=lengths,
        variable=variable,
        is_checked=False,
    )


def _leaf_names(kjt: KeyedJaggedTensor) -> list[str]:
    return ["values", "lengths", *kjt._columns, *([] if kjt._inverse is None else ["inverse_indices"])]


_tree.register(KeyedJaggedTensor, lambda kjt: (_leaves(kjt), _context(kjt)), _unflatten, _leaf_names)
