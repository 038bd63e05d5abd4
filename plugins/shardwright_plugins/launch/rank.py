"""Program of a rank that :func:`shardwright_plugins.launch.launch` starts: ``python -m ... FOLDER PARENT``."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from pathlib import Path

import cloudpickle
from torch.distributed.elastic.multiprocessing.errors import record

from shardwright.runtime.ranks.group_store import has_ended

_BETWEEN_LOOKS_S = 1.0
"""Time between two looks at the process that started this one, s."""


@record
def main(folder: Path) -> None:
    """Make the call that is in the folder, and write its result there."""
    function, args = cloudpickle.loads((folder / "call").read_bytes())
    (folder / f"result_{os.environ['RANK']}").write_bytes(cloudpickle.dumps(function(*args)))


def end_with(parent: int, folder: Path) -> None:
    """End this process soon after its parent has ended, however that ended, and remove the folder of both."""
    while not has_ended(parent):
        time.sleep(_BETWEEN_LOOKS_S)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def leave() -> None:
    """End this process with success, without what an interpreter does at its end, as those of `multiprocessing`.

    Threads that torch has left may abort a process whose interpreter ends, and the call has been made.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    folder, parent = Path(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=end_with, args=(parent, folder), daemon=True).start()
    try:
        main(folder)
    except Exception:
        sys.exit(1)  # the error is in a file, and raised where the ranks were started
    leave()
