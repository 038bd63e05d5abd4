"""Increments as files: Arrow IPC files in a folder, some a rank."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa

import shardwright as sw


def write_increment(
    folder: str | os.PathLike[str], batches: Iterable[pa.RecordBatch], *, rank: int = 0
) -> None:
    """Write a rank's part of an increment, in the place of what it wrote to the folder before.

    Each file has its name when all of it is there.

    Args:
        folder: folder of the increment, which is made; all ranks write to the same.
        batches: result of :meth:`~shardwright_delta.Changes.take`.
        rank: number of this rank.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    before = {*folder.glob(f"{rank:05}-*.arrow")}
    for number, batch in enumerate(batches):
        path = folder / f"{rank:05}-{number:05}.arrow"
        unfinished = path.with_suffix(".unfinished")
        with pa.OSFile(str(unfinished), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)
        before.discard(unfinished.rename(path))
    for path in before:
        path.unlink()


def read_increment(folder: str | os.PathLike[str]) -> Iterator[pa.RecordBatch]:
    """Read what all ranks wrote, each file mapped into memory.

    Args:
        folder: folder of the increment.

    Raises:
        InvalidInputError: there is no such folder, or a file in it is no Arrow file.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise sw.InvalidInputError(
            f"{folder} is no folder of an increment: write_increment() makes it, on a rank without changes too",
            subject=str(folder),
        )
    for path in sorted(folder.glob("*.arrow")):
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
        except pa.ArrowInvalid as error:
            raise sw.InvalidInputError(
                f"{path} is no file of an increment, or is damaged: {error}", subject=str(path)
            ) from error
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
