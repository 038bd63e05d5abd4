"""Batches from columns of Arrow tables. Imports pyarrow only where it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.error_reports import reporting_errors
from shardwright.errors import DuplicateNameError, InvalidInputError, UnsupportedError
from shardwright.sparse import WEIGHTS, KeyedJaggedTensor, _validation
from shardwright.sparse._foreign import Column, joined

__all__ = ["from_arrow"]

_OWNER = "from_arrow"


def from_arrow(
    data: Any, keys: Sequence[str] | None = None, weights: Mapping[str, str] | None = None
) -> KeyedJaggedTensor:
    """A batch from columns of lists of integers, or of integers, in Arrow's memory; needs pyarrow.

    Args:
        data: a `pyarrow.Table`, or what pyarrow makes one of: a record batch, a DataFrame of pandas or polars.
        keys: names of the columns, in the order the keys shall have; all that hold no weights by default.
        weights: key -> name of the column of its weights, of as many numbers in each list; all keys have one, or none.

    Returns:
        A `KeyedJaggedTensor` on the CPU, as of `from_lists`; a null is an empty bag.

    Raises:
        UnknownNameError: a column is not there.
        InvalidInputError: a column holds something else, or weights do not fit; names it.
        UnsupportedError: pyarrow is not installed.

    Example:
        >>> import pyarrow
        >>> from shardwright_plugins.arrow import from_arrow
        >>> print(from_arrow(pyarrow.table({"user": [7, 8], "seen": [[4, 5], None]})))
        KeyedJaggedTensor({
            "user": [[7], [8]],
            "seen": [[4, 5], []]
        })
    """
    with reporting_errors():
        table = table_of(_OWNER, data)
        of_weights = set(weights.values()) if weights else set()
        if keys is None:
            keys = [name for name in table.column_names if name not in of_weights]
        ids, own = columns(_OWNER, table, keys, weights)
        if not ids:
            return KeyedJaggedTensor.empty(is_weighted=own is not None)
        beside = {} if own is None else {WEIGHTS: own}
        return KeyedJaggedTensor(list(ids), **joined(_OWNER, ids, beside)).sync()


def columns(owner: str, table: Any, keys: Iterable[str], weights: Mapping[str, str] | None) -> Any:
    """The ids of columns of an Arrow table, and their weights.

    Args:
        owner: who speaks.
        table: Arrow table, made by :func:`table_of`.
        keys: names of columns.
        weights: key -> name of the column of its weights.

    Raises:
        UnknownNameError: a column is not there.
        InvalidInputError: a column holds something else, or a null in a bag; names it.
    """
    keys = list(keys)
    _validation.check_keys(owner, keys)
    ids = {key: _column(owner, table, key, _ids) for key in keys}
    if weights is None:
        return ids, None
    return ids, {key: _column(owner, table, name, _floats) for key, name in weights.items()}


def table_of(owner: str, data: Any) -> Any:
    """A ``pyarrow.Table`` of whatever pyarrow takes for one: a record batch, a DataFrame of pandas or polars, ...

    Raises:
        UnsupportedError: pyarrow is not installed.
        InvalidInputError: pyarrow makes no table of it.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise UnsupportedError(
            f"{owner} needs pyarrow, which cannot be imported: pip install pyarrow"
        ) from error
    if isinstance(data, pyarrow.Table):
        return data
    try:
        if type(data).__module__.partition(".")[0] == "pandas":  # whose index is no feature
            return pyarrow.Table.from_pandas(data, preserve_index=False)
        return pyarrow.table(data)
    except (TypeError, ValueError, pyarrow.ArrowException) as error:
        raise InvalidInputError(
            f"{owner}: pyarrow makes no table of a {type(data).__name__}: {error}"
        ) from error


def _column(owner: str, table: Any, name: str, convert: Callable[[str, Any], NDArray[Any]]) -> Column:
    import pyarrow.compute

    if name not in table.column_names:
        raise _validation.unknown_key(owner, name, table.column_names)
    if table.column_names.count(name) > 1:
        raise DuplicateNameError(
            f"{owner}: {table.column_names.count(name)} columns are called {name!r}; rename them."
        )
    column, where = table.column(name).combine_chunks(), f"{owner}: column {name!r}"
    kind = pyarrow.types
    is_list = any(test(column.type) for test in (kind.is_list, kind.is_large_list, kind.is_fixed_size_list))
    if is_list:
        flat, lengths = column.flatten(), pyarrow.compute.list_value_length(column).fill_null(0)
    else:
        flat, lengths = column.drop_null(), column.is_valid()
    if flat.null_count:
        raise InvalidInputError(
            f"{where}: {flat.null_count} of the numbers in its bags are null; leave them out."
        )
    return Column(convert(where, flat), lengths.to_numpy(zero_copy_only=False).astype(np.int32))


def _ids(where: str, flat: Any) -> NDArray[np.int64]:
    import pyarrow

    if len(flat) and not pyarrow.types.is_integer(flat.type):
        advice = "Cast them" if pyarrow.types.is_floating(flat.type) else "Hash strings"
        raise InvalidInputError(
            f"{where}: ids must be integers, or lists of them; got {flat.type}. {advice} first."
        )
    return _cast(where, flat, pyarrow.int64())


def _floats(where: str, flat: Any) -> NDArray[np.float32]:
    import pyarrow

    if len(flat) and not (pyarrow.types.is_floating(flat.type) or pyarrow.types.is_integer(flat.type)):
        raise InvalidInputError(f"{where}: weights must be numbers, or lists of them; got {flat.type}.")
    return _cast(where, flat, pyarrow.float32())


def _cast(where: str, flat: Any, to: Any) -> NDArray[Any]:
    import pyarrow

    try:
        array: NDArray[Any] = flat.cast(to, safe=pyarrow.types.is_integer(to)).to_numpy(zero_copy_only=False)
    except pyarrow.ArrowInvalid as error:
        raise InvalidInputError(f"{where}: {error}") from error
    return array
