"""`KeyedJaggedTensor`: a batch of several features, each with bags of different lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor

from shardwright.arguments import checked
from shardwright.contracts.compute_kernel import WEIGHTS
from shardwright.error_reports import reporting_errors
from shardwright.errors import InvalidInputError
from shardwright.sparse import _foreign, _keyed_validation, _tree, _validation, _variable_stride
from shardwright.sparse._keyed_bags import NAME, joined_columns
from shardwright.sparse._selectable_bags import SelectableBags
from shardwright.sparse.jagged_tensor import JaggedTensor


@final
class KeyedJaggedTensor(SelectableBags):
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

    __slots__ = ()

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
            _validation.check_one_of_lengths_offsets(NAME, lengths, offsets)
            values, weights, lengths, offsets = _foreign.as_tensors(
                NAME, values=values, weights=weights, lengths=lengths, offsets=offsets
            )
            self._index_per_key = _validation.check_keys(NAME, keys, distinct=False)
            self._keys = tuple(keys)
            self._values = _keyed_validation.as_values(NAME, values)
            self._columns = _foreign.as_columns(NAME, weights, columns)
            self._lengths = None if lengths is None else _keyed_validation.flat_lengths(lengths, len(keys))
            self._offsets = None if offsets is None else _validation.as_indices(NAME, "offsets", offsets)
            self._checked_at = None
            self._length_per_key = self._offset_per_key = None
            self._variable = _variable_stride.read(
                self._keys, self._num_bags(), stride_per_key_per_rank, stride_per_key, inverse_indices
            )
            self._check_form()
            self._stride = self._derived_stride(stride)
            if (length_per_key, offset_per_key, lengths_offset_per_key, index_per_key) != (
                None,
                None,
                None,
                None,
            ):
                self._take_known(length_per_key, offset_per_key, lengths_offset_per_key, index_per_key)

    def _derived_stride(self, stride: int | None) -> int:
        """B; one that was given must fit."""
        if self._variable is None:
            return _keyed_validation.derive_stride(len(self._keys), self._num_bags(), stride)
        if stride is not None and stride != self._variable.stride:
            raise InvalidInputError(
                f"{NAME}: got a stride of {stride}, but the batch sizes of its keys are {self._variable.per_key} and "
                f"the whole batch has {self._variable.stride} examples. Leave stride out."
            )
        return self._variable.stride

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
        owner = f"{NAME}.from_lists"
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
        owner = f"{NAME}.from_jt_dict"
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
            columns=joined_columns(owner, names, parts),
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
        owner = f"{NAME}.concat"
        if not kjt_list:
            raise InvalidInputError(f"{owner}: got a list of 0; {NAME}.empty() makes one without keys.")
        names = [f"part {i}" for i in range(len(kjt_list))]
        for name, part in zip(names, kjt_list, strict=True):
            if problem := part.late_problem():
                raise InvalidInputError(f"{owner}: {name}: {problem}", subject=name)
        variable = None
        if any(part.variable_stride_per_key() for part in kjt_list):
            variable = _variable_stride.joined(owner, [(part._keys, part._strides()) for part in kjt_list])
        else:
            _keyed_validation.check_same_stride(owner, names, [part.stride() for part in kjt_list])
        keys = tuple(key for part in kjt_list for key in part._keys)
        known = [part._length_per_key for part in kjt_list if part._length_per_key is not None]
        used = [part._used() for part in kjt_list]
        return KeyedJaggedTensor._trusted(
            keys,
            _validation.joined(owner, "values", [part._values for part in used]),
            kjt_list[0].stride() if variable is None else variable.stride,
            columns=joined_columns(owner, names, used),
            lengths=torch.cat([part.lengths() for part in kjt_list]),
            length_per_key=list(chain(*known)) if len(known) == len(kjt_list) else None,
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


_tree.register(
    KeyedJaggedTensor,
    lambda kjt: (kjt._leaves(), kjt._context()),
    KeyedJaggedTensor._unflattened,
    KeyedJaggedTensor._leaf_names,
)
