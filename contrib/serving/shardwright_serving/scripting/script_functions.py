"""Functions of the sparse types in TorchScript, which scripts call in the place of ours.

All keys of a batch have the same samples: batch sizes per key, and exchanges between ranks, are not in TorchScript.

TorchScript reads annotations, so they are no text here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright import JaggedTensor, KeyedJaggedTensor, KeyedTensor, UnsupportedError
from shardwright_serving.scripting.script_classes import register_script_types


def empty_jagged(
    is_weighted: bool = False,
    device: torch.device | None = None,
    values_dtype: torch.dtype | None = None,
    weights_dtype: torch.dtype | None = None,
    lengths_dtype: torch.dtype = torch.int32,
) -> JaggedTensor:
    """`JaggedTensor.empty` in TorchScript."""
    weights: Tensor | None = None
    if is_weighted:
        weights = torch.empty(0, dtype=weights_dtype, device=device)
    values = torch.empty(0, dtype=values_dtype, device=device)
    return JaggedTensor(values, weights, torch.empty(0, dtype=lengths_dtype, device=device))


def empty_keyed(
    is_weighted: bool = False,
    device: torch.device | None = None,
    values_dtype: torch.dtype | None = None,
    weights_dtype: torch.dtype | None = None,
    lengths_dtype: torch.dtype = torch.int32,
) -> KeyedJaggedTensor:
    """`KeyedJaggedTensor.empty` in TorchScript."""
    weights: Tensor | None = None
    if is_weighted:
        weights = torch.empty(0, dtype=weights_dtype, device=device)
    values = torch.empty(0, dtype=torch.int64 if values_dtype is None else values_dtype, device=device)
    lengths = torch.empty(0, dtype=lengths_dtype, device=device)
    return KeyedJaggedTensor(torch.jit.annotate(list[str], []), values, weights, lengths)


def empty_like_keyed(kjt: KeyedJaggedTensor, device: torch.device | None = None) -> KeyedJaggedTensor:
    """`KeyedJaggedTensor.empty_like` in TorchScript."""
    place = kjt.values().device if device is None else device
    values = torch.empty(0, dtype=kjt.values().dtype, device=place)
    lengths = torch.empty(0, dtype=kjt.lengths().dtype, device=place)
    keys = torch.jit.annotate(list[str], [])
    made = KeyedJaggedTensor(keys, values, None, lengths, None, kjt.stride())
    for name, column in kjt.columns().items():
        made._columns[name] = torch.empty(0, dtype=column.dtype, device=place)
    return made


def from_lengths(
    keys: list[str],
    values: Tensor,
    lengths: Tensor,
    weights: Tensor | None = None,
    stride: int | None = None,
    columns: dict[str, Tensor] | None = None,
) -> KeyedJaggedTensor:
    """`KeyedJaggedTensor.from_lengths_sync` in TorchScript."""
    return KeyedJaggedTensor(keys, values, weights, lengths, None, stride, columns=columns)


def from_offsets(
    keys: list[str],
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None = None,
    stride: int | None = None,
    columns: dict[str, Tensor] | None = None,
) -> KeyedJaggedTensor:
    """`KeyedJaggedTensor.from_offsets_sync` in TorchScript."""
    return KeyedJaggedTensor(keys, values, weights, None, offsets, stride, columns=columns)


def concat(kjt_list: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """`KeyedJaggedTensor.concat` in TorchScript."""
    stride = kjt_list[0].stride()
    keys = torch.jit.annotate(list[str], [])
    names = kjt_list[0].columns().keys()
    for part in kjt_list:
        assert part.stride() == stride, "the batches have different numbers of samples"
        assert sorted(part.columns().keys()) == sorted(names), (
            "some batches have weights or other columns that others do not have"
        )
        keys += part.keys()
    values = torch.cat([part.values() for part in kjt_list])
    made = KeyedJaggedTensor(
        keys, values, None, torch.cat([part.lengths() for part in kjt_list]), None, stride
    )
    for name in names:
        own = [part.columns()[name] for part in kjt_list]
        for column in own:
            assert name == "weights" or column.dtype == own[0].dtype, "a column has several dtypes: " + name
        made._columns[name] = torch.cat(own)
    return made


def jagged_from_dense(values: list[Tensor], weights: list[Tensor] | None = None) -> JaggedTensor:
    """`JaggedTensor.from_dense`."""
    sizes: list[int] = []
    for bag in values:
        sizes.append(bag.shape[0])
    lengths = torch.tensor(sizes, dtype=torch.int32, device=values[0].device)
    joined: Tensor | None = None
    if weights is not None:
        joined = torch.cat(weights)
    return JaggedTensor(torch.cat(values), joined, lengths)


def from_jt_dict(jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
    """`KeyedJaggedTensor.from_jt_dict`."""
    parts: list[KeyedJaggedTensor] = []
    for key, bags in jt_dict.items():
        part = KeyedJaggedTensor([key], bags.values(), None, bags.lengths())
        for name, column in bags.columns().items():
            part._columns[name] = column
        parts.append(part)
    return concat(parts)


def from_tensor_list(keys: list[str], tensors: list[Tensor], key_dim: int = 1) -> KeyedTensor:
    """`KeyedTensor.from_tensor_list`."""
    columns: list[int] = []
    for tensor in tensors:
        columns.append(tensor.shape[key_dim])
    return KeyedTensor(keys, columns, torch.cat(tensors, key_dim), key_dim)


def regroup(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[Tensor]:
    """`KeyedTensor.regroup`."""
    by_name = [keyed.to_dict() for keyed in keyed_tensors]
    found: list[Tensor] = []
    for group in groups:
        parts: list[Tensor] = []
        for key in group:
            count = len(parts)
            for one in by_name:
                if key in one:
                    parts.append(one[key])
            assert len(parts) == count + 1, "not one keyed tensor has it, but none or several: " + key
        found.append(torch.cat(parts, keyed_tensors[0].key_dim()))
    return found


def regroup_as_dict(
    keyed_tensors: list[KeyedTensor], groups: list[list[str]], keys: list[str]
) -> dict[str, Tensor]:
    """`KeyedTensor.regroup_as_dict`."""
    found: dict[str, Tensor] = {}
    for key, group in zip(keys, regroup(keyed_tensors, groups)):  # noqa: B905 - TorchScript has no strict=
        found[key] = group
    return found


# Functions of our types -> what TorchScript compiles where code calls them.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "JaggedTensor.empty": empty_jagged,
    "JaggedTensor.from_dense": jagged_from_dense,
    "KeyedJaggedTensor.concat": concat,
    "KeyedJaggedTensor.empty": empty_keyed,
    "KeyedJaggedTensor.empty_like": empty_like_keyed,
    "KeyedJaggedTensor.from_jt_dict": from_jt_dict,
    "KeyedJaggedTensor.from_lengths_sync": from_lengths,
    "KeyedJaggedTensor.from_offsets_sync": from_offsets,
    "KeyedTensor.from_tensor_list": from_tensor_list,
    "KeyedTensor.regroup": regroup,
    "KeyedTensor.regroup_as_dict": regroup_as_dict,
}


def function_for(name: str) -> Callable[..., Any]:
    """The function that TorchScript compiles for one of ours.

    Args:
        name: the class and the function of ours.

    Raises:
        UnsupportedError: TorchScript has no such function.
    """
    register_script_types()
    if name not in _FUNCTIONS:
        raise UnsupportedError(
            f"TorchScript has no {name}; of functions that make sparse types it has {', '.join(_FUNCTIONS)}"
        )
    return _FUNCTIONS[name]
