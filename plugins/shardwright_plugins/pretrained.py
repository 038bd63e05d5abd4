"""Weights from elsewhere, streamed into a sharded table without a whole table in memory.

Legend: R rows, D columns of the table; N rows of a block of what is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor, nn

from shardwright.arguments import check_unmasked
from shardwright.errors import InvalidInputError, UnknownNameError, UnsupportedError, nearest
from shardwright.runtime.sharded.tables.table_state import LocalBlock
from shardwright_plugins.checkpoint.entries import NamedTable, Trained

AT_ONCE_BYTES = 64 << 20
"""Bytes of the rows that are in memory at once beside the table's."""


def load_pretrained(model: nn.Module, table: str, source: Any) -> None:
    """Fill a sharded table with weights from an array, a file or blocks of rows; optimizer state stays as it is.

    No collective; every rank makes this call, and takes the rows of its own blocks. Of arrays and of files that can be
    read anywhere, ranks read the rows between the first and the last that they have.

    Args:
        model: model with sharded tables.
        table: the table's name.
        source: ``[R, D]``: a tensor or array; a file that can be cut by rows, such as
            ``numpy.load("rows.npy", mmap_mode="r")`` or ``safetensors.safe_open(path, "pt").get_slice("rows")``; or an
            iterable of blocks ``[N, D]`` of neighbouring rows.

    Raises:
        UnknownNameError: the model has no such table.
        InvalidInputError: the shape is not the table's, or what is there are no real numbers; about the table. An
            iterable that ends too early has been read by then.
        UnsupportedError: the table's rows belong to keys.

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
    for start, block in weights.blocks(_span(named)):
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
    """The source of a table's weights; its errors name the table.

    Args:
        table: name of the table.
        described: its name and shape, for texts.
        shape: ``R, D``.
        source: array, file or blocks of rows.
    """

    table: str
    described: str
    shape: tuple[int, int]
    source: Any

    def error(self, what: str, asked: Any) -> InvalidInputError:
        """Make an error about the table.

        Args:
            what: text on the fault.
            asked: value of the source that cannot be taken.
        """
        return InvalidInputError(f"table {self.described}: {what}", subject=self.table, asked=asked)

    @property
    def _size(self) -> tuple[int, ...] | None:
        """The shape of a source that can be cut by rows; ``None`` of blocks."""
        if (shape := getattr(self.source, "shape", None)) is not None:
            return tuple(shape)
        get_shape = getattr(self.source, "get_shape", None)  # of a tensor in a file of safetensors
        return None if get_shape is None else tuple(get_shape())

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
        if self._size is None and reached != self.shape[0]:
            raise self.error(f"the blocks of rows end at row {reached}", reached)

    def blocks(self, span: tuple[int, int]) -> Iterator[tuple[int, Tensor]]:
        """Blocks of rows, and the first row of each; of what can be read anywhere, only those in a span."""
        if isinstance(self.source, Tensor):
            self._check_values(self.source)
        if (size := self._size) is not None:
            yield from self._pieces(self.source, size, span)
        elif isinstance(self.source, Iterable) and not isinstance(self.source, str | bytes):
            yield from self._numbered(self.source)
        else:
            kind = type(self.source).__name__
            raise self.error(
                f"weights come as an array, a file that can be cut by rows or blocks of rows, got a {kind}",
                kind,
            )

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
