"""Weights from elsewhere, streamed into a sharded table without a whole table in memory.

Legend: R rows, D columns of the table; N rows of a block of what is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from shardwright.errors import InvalidInputError, UnknownNameError, UnsupportedError, nearest
from shardwright.runtime.checkpoint.entries import NamedTable, Trained
from shardwright.runtime.sharded.tables.table_state import LocalBlock

AT_ONCE_BYTES = 64 << 20
"""Bytes of the rows that are in memory at once beside the table's."""

Source: TypeAlias = "Tensor | np.ndarray[Any, Any] | str | os.PathLike[str] | Iterable[Any]"


def load_pretrained(model: nn.Module, table: str, source: Source, *, key: str | None = None) -> None:
    """Fill a sharded table with weights from an array, a file or blocks of rows; optimizer state stays as it is.

    No collective; every rank makes this call, and takes the rows of its own blocks. Of arrays and files that can be
    read anywhere, ranks read the rows between the first and the last that they have.

    Args:
        model: model with sharded tables.
        table: the table's name.
        source: ``[R, D]``: a tensor or array, memory maps too; a path of ``.npy``, ``.safetensors`` or ``.parquet``
            (``D`` columns of numbers, or one of lists); or an iterator of blocks ``[N, D]`` of neighbouring rows.
        key: name of the tensor or the column in a file that has several.

    Raises:
        UnknownNameError: the model has no such table, or the file no such tensor.
        InvalidInputError: the shape is not the table's, or the numbers are complex. An iterator that ends too early has
            been read by then.
        UnsupportedError: the table's rows belong to keys, or files of this kind are not known here.

    Example:
        >>> import numpy as np, shardwright as sw
        >>> from shardwright_plugins.pretrained import load_pretrained
        >>> table = sw.EmbeddingBagConfig(name="t", num_embeddings=3, embedding_dim=2, feature_names=["f"])
        >>> bags = sw.EmbeddingBagCollection([table], device="meta")
        >>> model = sw.DistributedModelParallel(bags, env=sw.ShardingEnv.local(device_type="cpu"))
        >>> load_pretrained(model, "t", np.arange(6.0).reshape(3, 2))
        >>> model.state_dict()["embedding_bags.t.weight"]
        tensor([[0., 1.],
                [2., 3.],
                [4., 5.]])
    """
    named = _table_of(model, table)
    spec = named.table.state.table
    if named.is_keyed:
        raise UnsupportedError(
            f"table {spec.describe()}: its ids are keys, and rows of an array have none: load_checkpoint() brings both"
        )
    shape = spec.num_embeddings, spec.embedding_dim
    reached = 0
    for start, block in _blocks(source, shape, key, _span(named)):
        _check_columns(spec.describe(), block, shape, start)
        with torch.no_grad():
            for local in named.table.state.local:
                _take(named, local, start, block)
        reached = start + len(block)
    if not _is_whole(source) and reached != shape[0]:
        raise InvalidInputError(f"table {spec.describe()}: the blocks of rows end at row {reached}")


def _table_of(model: nn.Module, table: str) -> NamedTable:
    tables = {named.table.state.table.name: named for named in Trained(model, ()).tables}
    if table not in tables:
        raise UnknownNameError(
            f"the model has no sharded table {table!r}; it has {', '.join(map(repr, tables)) or 'none'}."
            f"{nearest(table, tables)}"
        )
    return tables[table]


def _span(named: NamedTable) -> tuple[int, int]:
    """First row and row after the last that this rank has."""
    bounds = [local.block.rows.bounds for local in named.table.state.local]
    if not all(bounds):
        return 0, named.table.state.table.num_embeddings
    known = [bound for bound in bounds if bound is not None]
    return min((start for start, _ in known), default=0), max((stop for _, stop in known), default=0)


def _take(named: NamedTable, local: LocalBlock, start: int, block: Tensor) -> None:
    """Copy the rows of a block of what is read that are a local block's."""
    values, columns = named.table.weight_of(local), local.block.columns
    ours = block[:, columns.start : columns.stop]
    bounds = local.block.rows.bounds
    if bounds is not None:
        first, last = max(start, bounds[0]), min(start + len(block), bounds[1])
        if first < last:
            values[first - bounds[0] : last - bounds[0]].copy_(ours[first - start : last - start])
        return
    row_map = local.block.rows.row_map
    rows = np.arange(start, start + len(block), dtype=np.int64)
    mine = np.flatnonzero(row_map.part_of(rows) == local.block.rows.index)
    at = torch.from_numpy(np.asarray(row_map.local_row_of(rows[mine])))
    values[at.to(values.device)] = ours[torch.from_numpy(mine)].to(values.device, values.dtype)


def _check_columns(table: str, block: Tensor, shape: tuple[int, int], start: int) -> None:
    if block.dim() != 2 or block.shape[1] != shape[1] or start + len(block) > shape[0]:
        raise InvalidInputError(
            f"table {table}: the rows from {start} on have the shape {list(block.shape)}, of {list(shape)}"
        )
    if block.is_complex():
        raise InvalidInputError(
            f"table {table}: the weights are complex ({block.dtype}), and a table has real numbers: give their real "
            "part"
        )


def _is_whole(source: Source) -> bool:
    """Return whether the shape of the source is known before it is read."""
    return isinstance(source, Tensor | np.ndarray) or (
        isinstance(source, str | os.PathLike) and Path(source).suffix in (".npy", ".safetensors")
    )


def _blocks(
    source: Source, shape: tuple[int, int], key: str | None, span: tuple[int, int]
) -> Iterator[tuple[int, Tensor]]:
    """Blocks of rows, and the first row of each; of what can be read anywhere, only those in a span."""
    if isinstance(source, str | os.PathLike):
        yield from _blocks_of_file(Path(source), shape, key, span)
    elif isinstance(source, Tensor | np.ndarray):
        yield from _pieces(source, tuple(source.shape), shape, span)
    elif isinstance(source, Iterable):
        yield from _numbered(source)
    else:
        raise InvalidInputError(
            f"weights come as an array, a path or blocks of rows, got a {type(source).__name__}"
        )


def _pieces(
    rows: Any, found: tuple[int, ...], shape: tuple[int, int], span: tuple[int, int]
) -> Iterator[tuple[int, Tensor]]:
    """Pieces of bounded size of something that can be cut by rows."""
    if found != shape:
        raise InvalidInputError(f"the weights have the shape {list(found)}; the table's is {list(shape)}")
    at_once = max(1, AT_ONCE_BYTES // (8 * shape[1]))
    for start in range(span[0], span[1], at_once):
        yield start, _tensor(rows[start : min(start + at_once, span[1])])


def _numbered(blocks: Iterable[Any]) -> Iterator[tuple[int, Tensor]]:
    start = 0
    for block in blocks:
        yield start, _tensor(block)
        start += len(block)


def _tensor(rows: Any) -> Tensor:
    # A copy of what is in a file: torch takes no arrays that cannot be written to.
    return rows.detach() if isinstance(rows, Tensor) else torch.from_numpy(np.array(rows))


def _blocks_of_file(
    path: Path, shape: tuple[int, int], key: str | None, span: tuple[int, int]
) -> Iterator[tuple[int, Tensor]]:
    if path.suffix == ".npy":
        try:
            rows = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise InvalidInputError(f"{path} cannot be read as an array of numbers: {error}") from error
        yield from _pieces(rows, rows.shape, shape, span)
    elif path.suffix == ".safetensors":
        yield from _safetensors(path, shape, key, span)
    elif path.suffix == ".parquet":
        yield from _numbered(_parquet(path, key))
    else:
        raise UnsupportedError(
            f"{path}: weights are read from .npy, .safetensors and .parquet; of other files, give blocks of rows"
        )


def _safetensors(
    path: Path, shape: tuple[int, int], key: str | None, span: tuple[int, int]
) -> Iterator[tuple[int, Tensor]]:
    try:
        from safetensors import safe_open
    except ImportError:
        raise UnsupportedError(f"{path}: safetensors is not installed (pip install safetensors)") from None
    with safe_open(path, framework="pt") as file:
        rows = file.get_slice(_chosen(path, key, list(file.keys())))
        yield from _pieces(rows, tuple(rows.get_shape()), shape, span)


def _chosen(path: Path, key: str | None, names: list[str]) -> str:
    if key is None and len(names) == 1:
        return names[0]
    if key is None or key not in names:
        asked = "several tensors: give key=" if key is None else f"no {key!r}:"
        raise UnknownNameError(f"{path} has {asked} {', '.join(names)}.{nearest(key or '', names)}")
    return key


def _parquet(path: Path, key: str | None) -> Iterator[np.ndarray[Any, Any]]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UnsupportedError(f"{path}: pyarrow is not installed (pip install pyarrow)") from None
    with pyarrow.parquet.ParquetFile(path) as file:
        columns = None if key is None else [key]
        for batch in file.iter_batches(columns=columns):
            arrays = [column.to_numpy(zero_copy_only=False) for column in batch.columns]
            # One column of lists, or one of numbers for each of the table's.
            yield np.stack(list(arrays[0])) if arrays[0].dtype == object else np.stack(arrays, axis=1)
