"""`python -m shardwright_torchrec SCRIPT ...` runs a TorchRec script, unchanged, on shardwright."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from shardwright_torchrec import install


def main() -> None:
    """Run the script with the arguments that follow it, as Python would."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m shardwright_torchrec SCRIPT [ARGUMENTS]")
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    install()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
