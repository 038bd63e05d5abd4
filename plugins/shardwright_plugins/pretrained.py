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
from attrs import frozen
from torch import Tensor, nn

from shardwright.arguments import check_unmasked
from shardwright.errors import (
    InvalidInputError,
    ShardwrightError,
    UnknownNameError,
    UnsupportedError,
    nearest,
)
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
        InvalidInputError: the shape is not the table's, or what is there are no real numbers; about the table, and of
            which file. An iterator that ends too early has been read by then.
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
            f"table {spec.describe()}: its ids are keys, and rows of an array have none: load_checkpoint() brings both",
            subject=table,
        )
    weights = _GivenWeights(table, spec.describe(), (spec.num_embeddings, spec.embedding_dim), source)
    reached = 0
    for start, block in weights.blocks(key, _span(named)):
        weights.check_block(block, start)
        with torch.no_grad():
            for local in named.table.state.local:
                _take(named, local, start, block)
        reached = start + len(block)
    weights.check_end(reached)


def _table_of(model: nn.Module, table: str) -> NamedTable:
    tables = {named.table.state.table.name: named for named in Trained(model, ()).tables}
    if table not in tables:
        raise UnknownNameError(
            f"the model has no sharded table {table!r}; it has {', '.join(map(repr, tables)) or 'none'}."
            f"{nearest(table, tables)}",
            asked=table,
            possible=tables,
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


@frozen(eq=False)
class _GivenWeights:
    """The source of a table's weights; its errors name both.

    Args:
        table: name of the table.
        described: its name and shape, for texts.
        shape: ``R, D``.
        source: array, path or blocks of rows.
    """

    table: str
    described: str
    shape: tuple[int, int]
    source: Any

    def error(self, what: str, asked: Any = None) -> InvalidInputError:
        """Make an error about the table, of its source.

        Args:
            what: text on the fault.
            asked: value of the source that cannot be taken; the path by default.
        """
        of = f", {self.source}" if self._path else ""
        told = str(self._path) if asked is None else asked
        return InvalidInputError(f"table {self.described}{of}: {what}", subject=self.table, asked=told)

    @property
    def _path(self) -> Path | None:
        return Path(self.source) if isinstance(self.source, str | os.PathLike) else None

    def check_block(self, block: Tensor, start: int) -> None:
        """Check that rows are real numbers of the table's shape."""
        if block.dim() != 2 or block.shape[1] != self.shape[1] or start + len(block) > self.shape[0]:
            found = list(block.shape)
            raise self.error(f"the rows from {start} on have the shape {found}, of {list(self.shape)}", found)
        if block.is_complex():
            raise self.error(
                f"the weights are complex ({block.dtype}), and a table has real numbers: give their real part",
                str(block.dtype).removeprefix("torch."),
            )

    def check_end(self, reached: int) -> None:
        """Check that blocks of rows, whose number is not known before, came to the last row."""
        is_known = isinstance(self.source, Tensor | np.ndarray) or (
            self._path is not None and self._path.suffix in (".npy", ".safetensors")
        )
        if not is_known and reached != self.shape[0]:
            raise self.error(f"the blocks of rows end at row {reached}", reached)

    def blocks(self, key: str | None, span: tuple[int, int]) -> Iterator[tuple[int, Tensor]]:
        """Blocks of rows, and the first row of each; of what can be read anywhere, only those in a span."""
        if self._path is not None:
            yield from self._of_file(self._path, key, span)
        elif isinstance(self.source, Tensor | np.ndarray):
            if isinstance(self.source, Tensor):
                self._check_values(self.source)
            yield from self._pieces(self.source, tuple(self.source.shape), span)
        elif isinstance(self.source, Iterable):
            yield from self._numbered(self.source)
        else:
            kind = type(self.source).__name__
            raise self.error(f"weights come as an array, a path or blocks of rows, got a {kind}", kind)

    def _pieces(
        self, rows: Any, found: tuple[int, ...], span: tuple[int, int]
    ) -> Iterator[tuple[int, Tensor]]:
        """Pieces of bounded size of something that can be cut by rows."""
        if found != self.shape:
            raise self.error(
                f"the weights have the shape {list(found)}; the table's is {list(self.shape)}", list(found)
            )
        at_once = max(1, AT_ONCE_BYTES // (8 * self.shape[1]))
        for start in range(span[0], span[1], at_once):
            yield start, self._tensor(rows[start : min(start + at_once, span[1])])

    def _numbered(self, blocks: Iterable[Any]) -> Iterator[tuple[int, Tensor]]:
        start = 0
        for block in blocks:
            made = self._tensor(block)
            yield start, made
            start += len(made)

    def _tensor(self, rows: Any) -> Tensor:
        if isinstance(rows, Tensor):
            self._check_values(rows)
            return rows.detach()
        check_unmasked(f"table {self.described}", "the weights", rows)
        try:
            # A copy of what is in a file: torch takes no arrays that cannot be written to.
            array = np.array(rows)
        except ValueError as error:  # rows of several lengths
            raise self.error(f"a block is no array of numbers: {error}", type(rows).__name__) from error
        if array.dtype.kind not in "fiubc":
            raise self.error(f"the weights are {array.dtype}, which are no numbers", str(array.dtype))
        if array.dtype.kind == "f" and array.dtype.itemsize > 8:  # torch has no longer ones
            array = array.astype(np.float64)
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))

    def _check_values(self, rows: Tensor) -> None:
        """Check that a tensor has a number for each place."""
        is_sparse = rows.layout is not torch.strided
        forms = {
            "meta": (rows.is_meta, "there are no numbers in them"),
            "quantized": (rows.is_quantized, "give .dequantize()"),
            "nested": (rows.is_nested, "give .to_padded_tensor(0.0)"),
            "sparse": (is_sparse, "give .to_dense()"),
        }
        for form, (is_so, instead) in forms.items():
            if is_so:
                raise self.error(f"the weights are a {form} tensor: {instead}", form)

    def _of_file(self, path: Path, key: str | None, span: tuple[int, int]) -> Iterator[tuple[int, Tensor]]:
        try:
            if path.suffix == ".npy":
                rows = np.load(path, mmap_mode="r", allow_pickle=False)
                yield from self._pieces(rows, rows.shape, span)
            elif path.suffix == ".safetensors":
                yield from self._safetensors(path, key, span)
            elif path.suffix == ".parquet":
                yield from self._numbered(_parquet(path, key))
            else:
                raise UnsupportedError(
                    f"{path}: weights are read from .npy, .safetensors and .parquet; of other files, give blocks of "
                    "rows",
                    subject=self.table,
                    asked=str(path),
                )
        except ShardwrightError:
            raise
        except Exception as error:  # whatever readers make of whatever bytes
            raise self.error(f"it cannot be read: {type(error).__name__}: {error}") from error

    def _safetensors(
        self, path: Path, key: str | None, span: tuple[int, int]
    ) -> Iterator[tuple[int, Tensor]]:
        try:
            from safetensors import safe_open
        except ImportError:
            raise UnsupportedError(
                f"{path}: safetensors is not installed (pip install safetensors)"
            ) from None
        with safe_open(path, framework="pt") as file:
            rows = file.get_slice(_chosen(path, key, list(file.keys())))
            yield from self._pieces(rows, tuple(rows.get_shape()), span)


def _chosen(path: Path, key: str | None, names: list[str]) -> str:
    if key is None and len(names) == 1:
        return names[0]
    if key is None or key not in names:
        asked = "several tensors: give key=" if key is None else f"no {key!r}:"
        raise UnknownNameError(
            f"{path} has {asked} {', '.join(names)}.{nearest(key or '', names)}",
            subject=str(path),
            asked=key,
            possible=names,
        )
    return key


def _parquet(path: Path, key: str | None) -> Iterator[np.ndarray[Any, Any]]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UnsupportedError(f"{path}: pyarrow is not installed (pip install pyarrow)") from None
    with pyarrow.parquet.ParquetFile(path) as file:
        columns = None if key is None else [_chosen(path, key, file.schema_arrow.names)]
        for batch in file.iter_batches(columns=columns):
            arrays = [column.to_numpy(zero_copy_only=False) for column in batch.columns]
            # One column of lists, or one of numbers for each of the table's.
            yield np.stack(list(arrays[0])) if arrays[0].dtype == object else np.stack(arrays, axis=1)
