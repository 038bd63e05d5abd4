"""A tensor whose elements are in a store: what is read of it is a copy, what is written into it is stored.

Legend: R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import shardwright as sw
from shardwright_store.store import Ints, RowStore

_ATEN = torch.ops.aten
_AT_ONCE = 1 << 20  # elements that are copied at once


class StoredRows(torch.Tensor):
    """Rows and columns ``[R, C]`` of a store that follow one another.

    Slices are such tensors too. ``index_select``, ``index_copy_``, indexing by rows and ``copy_`` go through the
    store row by row; any other function gets, and may change, a copy of all rows.

    Attributes:
        store: the store.
        value: the name of the value that the columns are of.
        first: number of the first row in the store, and of the first column in the value.
        width: columns of the value.
    """

    store: RowStore
    value: str
    first: tuple[int, int]
    width: int

    @staticmethod
    def __new__(  # noqa: D102 - described by its class
        cls: type[StoredRows], store: RowStore, value: str, shape: tuple[int, int], dtype: torch.dtype
    ) -> StoredRows:
        made: StoredRows = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device="cpu")
        made.store, made.value, made.first, made.width = store, value, (0, 0), shape[1]
        return made

    @classmethod
    def added(
        cls, store: RowStore, num_rows: int, value: str, columns: int, dtype: torch.dtype, initial: float
    ) -> StoredRows:
        """One more value of all rows of a store, ``initial`` at first."""
        store.add(value, torch.full((columns,), initial, dtype=dtype).view(torch.uint8).numpy().tobytes())
        return cls(store, value, (num_rows, columns), dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StoredRows({list(self.shape)}, {self.dtype}, in {self.store.path})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)  # so does torch.save write it, a plain tensor

    def __deepcopy__(self, memo: Any) -> Tensor:
        copied: Tensor = memo.setdefault(id(self), self.clone())
        return copied

    def part(self, rows: slice = slice(None), columns: slice = slice(None)) -> StoredRows:
        """Some of the rows and columns, shared storage."""
        spans = [own.indices(size)[:2] for own, size in zip((rows, columns), self.shape, strict=True)]
        num_rows, num_columns = (max(stop - start, 0) for start, stop in spans)
        part = StoredRows(self.store, self.value, (num_rows, num_columns), self.dtype)
        part.first, part.width = (self.first[0] + spans[0][0], self.first[1] + spans[1][0]), self.width
        return part

    def read(self, index: Tensor | None = None) -> Tensor:
        """A copy of some rows, all by default: ``[N, C]``."""
        return self._read(self._numbers(index))[:, self._columns].contiguous()

    def _read(self, numbers: Ints) -> Tensor:
        """All columns of rows of the store: ``[N, width]``."""
        if not len(numbers):
            return torch.empty(0, self.width, dtype=self.dtype)
        values = torch.frombuffer(self.store.read(self.value, numbers), dtype=self.dtype)
        return values.view(len(numbers), self.width)

    def write(self, values: Tensor, index: Tensor | None = None) -> None:
        """Set some rows, all by default.

        Args:
            values: ``[N, C]``, or what broadcasts to that.
            index: numbers of the rows among these, ``[N]``.
        """
        numbers = self._numbers(index)
        if values.shape != (shape := (len(numbers), self.shape[1])):
            values = values.clone().expand(shape)
        at_once = max(1, _AT_ONCE // self.width)
        for start in range(0, len(numbers), at_once):
            rows, own = numbers[start : start + at_once], values[start : start + at_once]
            own = own.read() if isinstance(own, StoredRows) else own
            own = own.to("cpu", self.dtype).contiguous()
            if own.shape[1] < self.width:
                whole = self._read(rows)
                whole[:, self._columns] = own
                own = whole
            self.store.write(self.value, rows, own.view(torch.uint8).numpy())

    @property
    def _columns(self) -> slice:
        return slice(self.first[1], self.first[1] + self.shape[1])

    def _numbers(self, index: Tensor | None) -> Ints:
        """Numbers in the store of some rows, which are checked."""
        if index is None:
            return torch.arange(self.first[0], self.first[0] + len(self)).numpy()
        if index.dtype is torch.bool:
            index = index.nonzero().squeeze(1)
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < len(self):
            raise IndexError(f"rows {index.tolist()[:4]}... of {len(self)} rows")
        return (index.cpu() + self.first[0]).numpy()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(func)
        if handler is not None and isinstance(args[0], StoredRows):
            answer = handler(*args, **(kwargs or {}))
            if answer is not NotImplemented:
                return answer
        return _by_copy(func, args, kwargs or {})


def _by_copy(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function with copies of all rows, and store those that it changes."""
    copies: dict[int, tuple[StoredRows, Tensor]] = {}

    def copy_of(rows: StoredRows) -> Tensor:
        return copies.setdefault(id(rows), (rows, rows.read()))[1]

    own_args, own_kwargs = tree_map_only(StoredRows, copy_of, (args, kwargs))
    if func.is_view and copies:
        raise sw.UnsupportedError(
            f"{func} of {next(iter(copies.values()))[0]!r} would be a view of rows that are not in memory: slice "
            "rows or columns, or take a clone()"
        )
    answer = func(*own_args, **own_kwargs)
    if func._schema.is_mutable:
        for rows, values in copies.values():
            rows.write(values)
            answer = rows if answer is values else answer
    return answer


def _slice(
    rows: StoredRows, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    if step != 1:
        return NotImplemented
    return rows.part(slice(start, end)) if dim in (0, -2) else rows.part(columns=slice(start, end))


def _index_select(rows: StoredRows, dim: int, index: Tensor, *, out: Tensor | None = None) -> Any:
    if dim not in (0, -2):
        return NotImplemented
    values = rows.read(index)
    return values if out is None else out.copy_(values)


def _index(rows: StoredRows, indices: list[Tensor | None]) -> Any:
    return NotImplemented if (index := _of_rows(indices)) is None else rows.read(index)


def _of_rows(indices: list[Tensor | None]) -> Tensor | None:
    """The index of rows, if there is no other."""
    return indices[0] if len(indices) == 1 and indices[0] is not None and indices[0].dim() == 1 else None


def _index_copy(rows: StoredRows, dim: int, index: Tensor, source: Tensor) -> Any:
    if dim not in (0, -2):
        return NotImplemented
    rows.write(source, index)
    return rows


def _index_put(
    rows: StoredRows, indices: list[Tensor | None], values: Tensor, accumulate: bool = False
) -> Any:
    if accumulate or (index := _of_rows(indices)) is None:
        return NotImplemented
    rows.write(values, index)
    return rows


def _copy(rows: StoredRows, values: Tensor, non_blocking: bool = False) -> StoredRows:
    rows.write(values)
    return rows


_HANDLERS: Mapping[Any, Callable[..., Any]] = {
    _ATEN.detach.default: StoredRows.part,
    _ATEN.alias.default: StoredRows.part,
    _ATEN.slice.Tensor: _slice,
    _ATEN.index_select.default: _index_select,
    _ATEN.index_select.out: _index_select,
    _ATEN.index.Tensor: _index,
    _ATEN.index_copy_.default: _index_copy,
    _ATEN.index_put_.default: _index_put,
    _ATEN.copy_.default: _copy,
}
