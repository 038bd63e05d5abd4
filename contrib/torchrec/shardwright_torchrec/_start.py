"""Serves `torchrec` from the start of a process whose parent says so in its environment.

`shardwright_torchrec.pth`, which Python reads at its start, imports this module where the variable is set. Until
somebody imports `torchrec`, nothing but the finder below is there, so that other processes start as quickly as ever.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec

ROOT = "torchrec"
VARIABLE = "SHARDWRIGHT_TORCHREC"
"""Environment variable; if it is not empty, `import torchrec` gives shardwright, here and in child processes."""


class Waiting:
    """Installs the names at the first import of `torchrec` or of something below it."""

    @classmethod
    def find_spec(cls, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The spec that the installed finder gives; none for what is not TorchRec's."""
        if fullname.partition(".")[0] != ROOT:
            return None
        from shardwright_torchrec.names import find_spec, install

        install()
        return find_spec(fullname)


if not any(finder is Waiting for finder in sys.meta_path):
    sys.meta_path.insert(0, Waiting)  # type: ignore[arg-type]  # a class serves as a finder, as importlib's own do
