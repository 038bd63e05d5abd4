"""The finder that serves `torchrec` from its first import on, in processes whose parent says so."""

from __future__ import annotations

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
