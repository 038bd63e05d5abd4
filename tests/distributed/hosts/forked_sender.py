"""A process that multiprocessing forks, and that ends before what it sent is read; to be run as a module."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection

from shardwright_plugins.comm_backends._segments import Own, Segment, Segments

SIZE = 5


def send(connection: Connection) -> None:
    """Tell the reader of a piece, and end."""
    segments = Segments(2)
    own: Own = segments.free(SIZE)
    own.segment.data[:SIZE] = 7
    own.told[1] += 1
    connection.send((own.segment.descriptor, own.segment.data.numel()))


def main() -> None:
    """Read what the forked process sent, when it would have ended long ago."""
    Segments(2)  # as in a process that has segments of its own before it forks
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    sender = context.Process(target=send, args=(theirs,), daemon=True)
    sender.start()
    descriptor, size = ours.recv()
    time.sleep(0.5)
    assert sender.pid is not None
    segment = Segment.open(sender.pid, descriptor, size, serial=1, num_peers=2)
    print(segment.data[:SIZE].tolist())
    segment.counts[1, 0] += 1
    sender.join(1.0)  # it waits no longer than that
    print(sender.exitcode)


if __name__ == "__main__":
    main()
