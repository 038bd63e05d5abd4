"""Names of data types: the forms in which tables' rows are stored. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, Self, cast

from shardwright.arguments import brief
from shardwright.errors import InvalidInputError


class _Words(type):
    """Gives ``DataType.FP16``, as an enumeration does."""

    def __getattr__(cls, word: str) -> Any:
        if word.startswith("_") or not word.isupper():
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {word!r}")
        return cls(word)


class DataType(str, metaclass=_Words):
    """The name of a data type, in capitals, with the ``value`` and ``name`` of an enumeration's member.

    ``FP32``, ``FP16`` and ``BF16`` are floats of torch, which tables are trained in. Any other name is that of a
    :class:`~shardwright.contracts.RowFormat`, which compute kernels bring: such rows are looked up and not trained.
    Whether there is such a kernel is asked where a table is planned or sharded.

    There is one object of each name, so that ``is`` compares them, copies too.

    Raises:
        InvalidInputError: it is no name.

    Example:
        >>> import shardwright as sw
        >>> sw.EmbeddingBagConfig(100, 8, "item", data_type="fp16").data_type == sw.DataType("FP16")
        True
    """

    __slots__ = ()

    def __new__(cls, name: str | Enum) -> Self:
        """The one object of a name."""
        if type(name) is cls:
            return name
        plain = getattr(name, "value", name)
        if not isinstance(plain, str) or not plain.isidentifier():
            raise InvalidInputError(f"a data type is a name such as 'FP32' or 'FP16', got {brief(name)}")
        word = plain.upper()
        return cast(Self, _NAMES.setdefault(word, super().__new__(cls, word)))

    @property
    def value(self) -> str:
        """The plain name."""
        return str.__str__(self)

    @property
    def name(self) -> str:
        """The plain name."""
        return str.__str__(self)


_NAMES: dict[str, DataType] = {}
"""The names that were made, which are few."""

TORCH_NAMES: Mapping[str, str] = MappingProxyType({"FP32": "float32", "FP16": "float16", "BF16": "bfloat16"})
"""Data types that tables are trained in, and the names of their torch dtypes."""
