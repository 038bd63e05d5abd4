"""`python -m shardwright_torchrec SCRIPT ...` runs a TorchRec script, unchanged, on shardwright."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from shardwright_torchrec import install

_USAGE = "usage: python -m shardwright_torchrec SCRIPT [ARGUMENTS] or -m MODULE [ARGUMENTS]"


def main() -> None:
    """Run the script, or the module after `-m`, with the arguments that follow it, as Python would."""
    del sys.argv[0]
    as_module = sys.argv[:1] == ["-m"]
    if as_module:
        del sys.argv[0]
    if not sys.argv or sys.argv[0].startswith("-"):
        sys.exit(_USAGE)
    install()
    if as_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
