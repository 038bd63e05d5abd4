"""`python -m shardwright_torchrec SCRIPT ...` runs a TorchRec script, unchanged, on shardwright."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from shardwright_torchrec import install

_USAGE = "usage: python -m shardwright_torchrec SCRIPT [ARGUMENTS], -m MODULE [ARGUMENTS], or api"


def main() -> None:
    """Run the script, or the module after `-m`, with the arguments that follow it, as Python would."""
    del sys.argv[0]
    as_module = sys.argv[:1] == ["-m"]
    if as_module:
        del sys.argv[0]
    if not sys.argv or sys.argv[0].startswith("-"):
        sys.exit(_USAGE)
    if sys.argv[0] == "api" and not as_module and not Path("api").exists():
        _report()
        return
    install()
    if as_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def _report() -> None:
    """Compare names with the TorchRec that is installed; what the user can repair is told without a traceback."""
    from shardwright import ShardwrightError
    from shardwright_torchrec.api.report import main as report

    try:
        report(sys.argv[1:])
    except ShardwrightError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
