"""Empty batches as text, so that ranks send each other the form of a batch without pickling it.

The text is JSON. A value is itself if JSON has it (numbers, strings, true, false, null), else ``[kind, content]``.
Objects are made of their attributes, without a call of their class. Only classes of modules that the reading process
has imported already are known, so that a text makes nobody import or run anything.
"""

from __future__ import annotations

import base64
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.errors import UnsupportedError
from shardwright.runtime.step.batches.batch_tree import attributes
from shardwright.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

_PLAIN = (type(None), bool, int, float, str)
_HEAP_TYPE = 1 << 9
"""``Py_TPFLAGS_HEAPTYPE``: set for classes that a ``class`` statement made (CPython, Include/object.h)."""


def to_text(batch: Any) -> str:
    """Write a batch as text.

    Raises:
        UnsupportedError: a part of it has no plain form, a function for example.
    """
    return json.dumps(_FormWriter().write(batch))


def from_text(text: str) -> Any:
    """Make the batch that :func:`to_text` wrote.

    Raises:
        UnsupportedError: a class in it is not known in this process.
    """
    return _FormReader().read(json.loads(text))


class _FormWriter:
    """A writer of one batch, which numbers containers and objects, since they may refer to each other."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def write(self, value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        if id(value) in self._numbers:
            return ["again", self._numbers[id(value)]]
        leaf = _LEAVES.get(type(value)) or (_array if isinstance(value, np.ndarray | np.generic) else None)
        if leaf is not None:
            return [*leaf(value)]
        if isinstance(value, Tensor):
            return ["tensor", _tensor(value)]
        if type(value) in _SPARSE:
            return [type(value).__name__, self._pairs(_SPARSE[type(value)](value))]
        return self._container(value)

    def _container(self, value: Any) -> list[Any]:
        if isinstance(value, Enum):
            return ["enum", [_name_of(type(value)), value.name]]
        if isinstance(value, tuple):
            is_named = type(value) is not tuple
            return [
                "named tuple" if is_named else "tuple",
                [*([_name_of(type(value))] if is_named else []), *map(self.write, value)],
            ]
        self._numbers[id(value)] = len(self._numbers)
        if type(value) is list:
            return ["list", [self.write(item) for item in value]]
        if type(value) in (dict, OrderedDict):
            return [type(value).__name__, self._pairs(value)]
        names = attributes(value)
        if not names or callable(value) or not _is_made_in_python(type(value)):
            raise UnsupportedError(f"a {type(value).__name__} has no plain form")
        return [
            "object",
            [_name_of(type(value)), self._pairs({name: getattr(value, name) for name in names})],
        ]

    def _pairs(self, items: Mapping[Any, Any]) -> list[Any]:
        return [[self.write(key), self.write(value)] for key, value in items.items()]


class _FormReader:
    """A reader of one text, which keeps the containers and objects in the order of their numbers."""

    def __init__(self) -> None:
        self._numbered: list[Any] = []

    def read(self, form: Any) -> Any:
        if not isinstance(form, list):
            return form
        kind, content = form
        if kind in _MAKERS:
            return _MAKERS[kind](content)
        if kind in _SPARSE_CLASSES:
            return _SPARSE_CLASSES[kind](**dict(self._read_pairs(content)))
        return getattr(self, f"_{kind.replace(' ', '_')}")(content)

    def _read_pairs(self, pairs: list[Any]) -> list[tuple[Any, Any]]:
        return [(self.read(key), self.read(value)) for key, value in pairs]

    def _again(self, number: int) -> Any:
        return self._numbered[number]

    def _tuple(self, items: list[Any]) -> tuple[Any, ...]:
        return tuple(map(self.read, items))

    def _named_tuple(self, content: list[Any]) -> Any:
        return tuple.__new__(_class_called(content[0], tuple), map(self.read, content[1:]))

    def _list(self, items: list[Any]) -> list[Any]:
        made: list[Any] = []
        self._numbered.append(made)
        made += map(self.read, items)
        return made

    def _dict(self, pairs: list[Any]) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        self._numbered.append(made)
        made.update(self._read_pairs(pairs))
        return made

    def _OrderedDict(self, pairs: list[Any]) -> OrderedDict[Any, Any]:
        made: OrderedDict[Any, Any] = OrderedDict()
        self._numbered.append(made)
        made.update(self._read_pairs(pairs))
        return made

    def _object(self, content: list[Any]) -> Any:
        name, pairs = content
        made = object.__new__(_class_called(name, object))
        self._numbered.append(made)
        for attribute, value in self._read_pairs(pairs):
            object.__setattr__(made, attribute, value)  # frozen classes too
        return made


def _bytes(data: Any) -> str:
    return base64.b64encode(data).decode()


def _tensor(tensor: Tensor) -> list[Any]:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return [
        str(tensor.dtype).removeprefix("torch."),
        list(tensor.shape),
        _bytes(flat.view(torch.uint8).numpy()),
    ]


def _made_tensor(content: list[Any]) -> Tensor:
    dtype, shape, data = content
    flat = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.uint8) if data else torch.empty(0)
    return flat.to(torch.uint8).view(getattr(torch, dtype)).reshape(shape)


def _array(array: Any) -> list[Any]:
    if array.dtype.kind not in "biufcSUmM":
        raise UnsupportedError(f"an array of {array.dtype} has no plain form")
    return [
        "array",
        [array.dtype.str, list(array.shape), isinstance(array, np.ndarray), _bytes(array.tobytes())],
    ]


def _made_array(content: list[Any]) -> Any:
    dtype, shape, is_array, data = content
    made = np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
    return made if is_array else made[()]


_LEAVES: dict[type, Callable[[Any], tuple[str, Any]]] = {
    bytes: lambda value: ("bytes", _bytes(value)),
    torch.Size: lambda value: ("size", list(value)),
    torch.device: lambda value: ("device", str(value)),
    torch.dtype: lambda value: ("dtype", str(value).removeprefix("torch.")),
}
_MAKERS: dict[str, Callable[[Any], Any]] = {
    "bytes": base64.b64decode,
    "size": torch.Size,
    "device": torch.device,
    "dtype": lambda name: getattr(torch, name),
    "tensor": _made_tensor,
    "array": _made_array,
    "enum": lambda content: _class_called(content[0], Enum)[content[1]],
}

# Arguments of the constructors of tensors with keys.
_SPARSE: dict[type, Callable[[Any], dict[str, Any]]] = {
    KeyedJaggedTensor: lambda value: {
        "keys": value.keys(),
        "values": value.values(),
        "weights": value.weights_or_none(),
        "lengths": value.lengths(),
        "stride": value.stride(),
    },
    JaggedTensor: lambda value: {
        "values": value.values(),
        "weights": value.weights_or_none(),
        "lengths": value.lengths(),
    },
    KeyedTensor: lambda value: {
        "keys": value.keys(),
        "length_per_key": value.length_per_key(),
        "values": value.values(),
        "key_dim": value.key_dim(),
    },
}
_SPARSE_CLASSES = {cls.__name__: cls for cls in _SPARSE}


def _is_made_in_python(cls: type) -> bool:
    """True if all that an object of the class holds are its attributes."""
    return all(base is object or base.__flags__ & _HEAP_TYPE for base in cls.__mro__)


def _name_of(cls: type) -> str:
    """The name by which other processes find a class.

    Raises:
        UnsupportedError: it cannot be found by a name, as one that was made in a function.
    """
    name = f"{cls.__module__}:{cls.__qualname__}"
    if _class_called(name, object) is not cls:
        raise UnsupportedError(f"the name {name} means another class than that of the batch")
    return name


def _class_called(name: str, base: type) -> Any:
    """A class of a module that is imported already.

    Raises:
        UnsupportedError: there is none in this process.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for word in path.split("."):
        found = getattr(found, word, None)
    if not isinstance(found, type) or not issubclass(found, base):
        raise UnsupportedError(f"this process knows no class {name}: import it on all ranks")
    return found
