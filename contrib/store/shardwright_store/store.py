"""Rows in one LMDB file, under their numbers.

Legend: N rows of a call, W bytes of a row's value.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

import lmdb
import numpy as np
import numpy.typing as npt

import shardwright as sw
from shardwright_store.kernel import FOLDER_VARIABLE

Ints: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]

_BLOCKS, _COMMIT = "blocks.json", b"commit"
# An address space, not a size: a value's key and header are 18 bytes, pages are half full at worst, and what was
# committed stays beside what is written until the next commit.
_MAP_PER_BYTE, _MAP_LEAST = 16, 1 << 28
# What a write takes of the disk at most: of each leaf that it changes a copy, another if that is split, and the branch
# above. Rows share leaves where they are neighbours: a leaf is at least a quarter full. A commit lists free pages.
_PAGE_BYTES, _COPIES, _KEY_BYTES, _LEAST_FILL, _ROOM_BYTES = 4096, 3, 18, 4, 1 << 24


class RowStore:
    """Values of the rows of some blocks: a database for each name, in which a row's number has its value.

    All reads and writes are in one transaction, which is open from a commit to the next. So a process that is killed
    leaves what was committed last.

    Args:
        path: folder of the file. A store that is there is one of the same blocks; its rows are seen after
            :meth:`restore`, and replaced by :meth:`commit`.
        blocks: description of the blocks, as JSON data.
        num_bytes: bytes of all values.

    Attributes:
        path: the folder.
        committed: what was said at the last commit; ``None`` if there was none.
        stays: its file has a name, and stays when the process ends.

    Raises:
        InvalidInputError: the store is one of other blocks, or is in use.
        UnsupportedError: the disk has less room; or, of all methods, the process was forked since. What was committed
            last is whole then.
    """

    def __init__(self, path: Path, blocks: Sequence[Mapping[str, Any]], num_bytes: int) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path, self.stays = path, True
        self._own(list(blocks))
        self._check_room("rows", num_bytes)
        size = _MAP_PER_BYTE * num_bytes + _MAP_LEAST
        self._env = lmdb.open(str(path), map_size=size, max_dbs=64, lock=False, writemap=True)
        self._databases: dict[str, tuple[Any, bytes]] = {}
        self._process = os.getpid()
        self._begin()
        found = self._transaction.get(_COMMIT)
        self.committed: Mapping[str, Any] | None = json.loads(bytes(found)) if found else None

    @classmethod
    def of(cls, blocks: Sequence[sw.BlockSpec], num_bytes: int, folder: str | None) -> RowStore:
        """Make or open the store of some blocks.

        Args:
            blocks: the blocks, whose rows are numbered one after the other.
            num_bytes: bytes of all values.
            folder: folder in which it has one of its own, named after the first block. ``None`` is a file that has no
                name and goes with the process.

        Raises:
            InvalidInputError: there can be no store in the folder.
        """
        described = [_described(spec) for spec in blocks]
        if folder:
            try:
                return cls(Path(folder, _name_of(blocks[0])), described, num_bytes)
            except (OSError, lmdb.Error) as error:
                raise sw.InvalidInputError(
                    f"{FOLDER_VARIABLE} is {folder!r}, where no store can be: {type(error).__name__}: {error}. Name a "
                    "folder on a local disk that may be written into",
                    subject=FOLDER_VARIABLE,
                    asked=folder,
                ) from error
        path = Path(tempfile.mkdtemp())
        try:
            made = cls(path, described, num_bytes)
        finally:
            shutil.rmtree(path)
        made.stays = False
        return made

    def _own(self, blocks: list[Mapping[str, Any]]) -> None:
        """Lock the folder for this store, as long as it lives, and compare the blocks that it is of."""
        file = os.open(self.path / _BLOCKS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        weakref.finalize(self, os.close, file)
        self._file = file
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise sw.InvalidInputError(
                f"the store {self.path} is in use, by another job or by tables of this one that are still there: give "
                "each job a folder of its own"
            ) from None
        found = os.read(file, os.fstat(file).st_size)
        if not found:
            os.write(file, json.dumps(blocks).encode())
        elif (other := json.loads(found)) != blocks:
            raise sw.InvalidInputError(
                f"the store {self.path} has rows of {other}, and this table's blocks are {blocks}. Name another "
                "folder, or remove this one if nobody needs its rows"
            )

    def _check_room(self, what: str, num_bytes: int) -> None:
        """Check the disk before it is written to: one that is full ends a process that writes into mapped memory."""
        disk = os.fstatvfs(self._file)
        if (free := disk.f_bavail * disk.f_frsize) < num_bytes:
            raise sw.UnsupportedError(
                f"{what}, up to {num_bytes} bytes, do not fit on the disk of {self.path}, which has {free} bytes left: "
                "make room, and go on from what was committed last, which is whole"
            )

    def __deepcopy__(self, memo: Any) -> RowStore:
        raise sw.UnsupportedError(
            f"the rows of the store {self.path} are not copied into memory: save without asynchronous=True, and "
            "they are written piece by piece"
        )

    def _begin(self) -> None:
        self._begun = self._env.begin(write=True, buffers=True)

    @property
    def _transaction(self) -> Any:
        """The open transaction; not in a process that was forked since, which would write into the same file."""
        if os.getpid() != self._process:
            raise sw.UnsupportedError(
                f"the store {self.path} belongs to process {self._process}, from which this one, {os.getpid()}, was "
                "forked: make the model in the process that trains it, or start that with the method 'spawn'"
            )
        return self._begun

    def add(self, name: str, initial: bytes) -> None:
        """Give rows one more value, which no row has yet.

        Args:
            name: name of the value.
            initial: value of a row that was never written, ``W`` bytes.
        """
        database = self._env.open_db(name.encode(), txn=self._transaction)
        self._transaction.drop(database, delete=False)  # what was committed is seen again after restore()
        self._databases[name] = database, initial

    def read(self, name: str, rows: Ints) -> bytearray:
        """Values of some rows, one after the other: ``N * W`` bytes."""
        database, initial = self._databases[name]
        get = self._transaction.get
        return bytearray().join([get(key, initial, database) for key in _keys(rows)])

    def write(self, name: str, rows: Ints, values: Bytes) -> None:
        """Set the values of some rows.

        Args:
            name: name of the value.
            rows: numbers of the rows, ``[N]``; of one that is there twice the last value counts.
            values: values, ``[N, W]``.
        """
        order = rows.argsort(kind="stable")  # keys that follow one another are on one page
        keys = rows[order]
        spanned = (
            int((keys[-1:] - keys[:1]).sum()) * (values.shape[1] + _KEY_BYTES) * _LEAST_FILL // _PAGE_BYTES
        )
        room = min(len(rows), spanned + 2) * _COPIES * _PAGE_BYTES + 2 * values.nbytes + _ROOM_BYTES
        self._check_room(f"changes of {len(rows)} rows", room)
        in_order = np.ascontiguousarray(values[order]).view(f"V{values.shape[1]}").ravel().tolist()
        with self._transaction.cursor(self._databases[name][0]) as cursor:
            cursor.putmulti(zip(_keys(keys), in_order, strict=True))

    def commit(self, told: Mapping[str, Any]) -> None:
        """Have all that was written on the disk.

        Args:
            told: JSON data to go with it.
        """
        self._check_room("lists of pages", _ROOM_BYTES)
        self._transaction.put(_COMMIT, json.dumps(told).encode())
        self._transaction.commit()
        self.committed = told
        self._begin()

    def restore(self) -> Mapping[str, Any]:
        """Forget all that was written since the last commit; return what was said at that.

        Raises:
            InvalidInputError: nothing was committed.
        """
        if self.committed is None:
            raise sw.InvalidInputError(f"nothing was committed to the store {self.path}")
        self._transaction.abort()
        self._begin()
        for name, (_, initial) in self._databases.items():
            self._databases[name] = (
                self._env.open_db(name.encode(), txn=self._transaction, create=False),
                initial,
            )
        return self.committed


def _keys(rows: Ints) -> list[bytes]:
    keys: list[bytes] = rows.astype(">u8").view("V8").tolist()
    return keys


def _described(spec: sw.BlockSpec) -> dict[str, Any]:
    block, table = spec.block, spec.table
    return {
        "table": table.path or table.name,
        "rows": [block.num_rows, table.num_embeddings],
        "part": [block.rows.index, block.rows.row_map.num_parts],
        "columns": [block.columns.start, block.columns.stop, table.embedding_dim],
        "data_type": str(spec.request.data_type),
        "optimizer": spec.request.optimizer.name if spec.request.optimizer else "",
        "rank": block.rank,
    }


def _name_of(spec: sw.BlockSpec) -> str:
    told = _described(spec)
    (part, parts), (start, stop, _) = told["part"], told["columns"]
    return quote(f"{told['table']}-part{part}of{parts}-columns{start}to{stop}-rank{told['rank']}", safe="")
