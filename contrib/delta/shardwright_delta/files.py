"""Increments as files: Arrow IPC files in a folder, some a rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa

__all__ = ["read_increment", "write_increment"]


def write_increment(folder: Path, batches: Iterable[pa.RecordBatch], *, rank: int = 0) -> None:
    """Write a rank's part of an increment. Each file has its name when all of it is there.

    Args:
        folder: folder of the increment, which is made; all ranks write to the same.
        batches: result of :meth:`~shardwright_delta.Changes.take`.
        rank: number of this rank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, batch in enumerate(batches):
        path = folder / f"{rank:05}-{number:05}.arrow"
        unfinished = path.with_suffix(".unfinished")
        with pa.OSFile(str(unfinished), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)
        unfinished.rename(path)


def read_increment(folder: Path) -> Iterator[pa.RecordBatch]:
    """Read what all ranks wrote, each file mapped into memory.

    Args:
        folder: folder of the increment.
    """
    for path in sorted(folder.glob("*.arrow")):
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
