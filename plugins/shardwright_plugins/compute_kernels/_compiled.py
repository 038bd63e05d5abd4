"""Compiled kernels: whether they can be used on this machine, and Numba's loops of them."""

from __future__ import annotations

import hashlib
import importlib
import pickle
import uuid
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from attrs import frozen


@cache
def import_failure(module: str, compiler: str) -> str | None:
    """Return why a module of compiled kernels cannot be used here, or ``None``; tried once.

    Args:
        module: full name of the module.
        compiler: name of its compiler, for people.
    """
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a broken or an unfit version raises
        return f"{compiler} cannot be used here: {type(error).__name__}: {error}"
    return None


@frozen
class _FilePerOverload:
    """The files in which Numba keeps what it compiled of one function, each written at once.

    Numba's own ``IndexDataCacheFile`` has an index, which it writes before the code: another process that starts then
    loads what an older Numba, or an older source, left under that number, and two that compile for different types
    take one number. Ranks start and compile together, so that both happen.

    Args:
        folder: the folder of the files.
        name: beginning of their names.
        stamp: version of Numba, and stamp of the source, that code must have been compiled with and from to be loaded.
    """

    folder: Path
    name: str
    stamp: tuple[Any, ...]

    def _path(self, key: Any) -> Path:
        return self.folder / f"{self.name}.{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.nbc"

    def load(self, key: Any) -> Any:
        """Code that was kept under a key (types, processor, bytecode), or ``None``."""
        try:
            with self._path(key).open("rb") as file:
                # What follows the stamp may not be read by this Numba unless the stamp is this one's.
                return pickle.load(file) if pickle.load(file) == self.stamp else None
        except (
            OSError,
            EOFError,
            pickle.UnpicklingError,
        ):  # none, or one that was cut off
            return None

    def save(self, key: Any, data: Any) -> None:
        """Keep code under a key, in the place of what is there."""
        from numba.core.serialize import dumps

        path = self._path(key)
        made = path.with_suffix(f".{uuid.uuid4().hex[:16]}")
        made.write_bytes(pickle.dumps(self.stamp) + dumps(data))
        made.replace(path)


def compiled(function: Any, **options: Any) -> Any:
    """Have Numba compile a loop on first use; kept on disk, unless there is no place that may be written to.

    Args:
        function: the loop, which gives the GIL up.
        options: further options of ``numba.njit``.
    """
    import numba

    try:
        made = numba.njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:
        return numba.njit(nogil=True, **options)(function)
    with suppress(AttributeError):  # a Numba that keeps them otherwise
        impl = made._cache._impl
        stamp = numba.__version__, impl.locator.get_source_stamp()
        made._cache._cache_file = _FilePerOverload(
            Path(impl.locator.get_cache_path()), impl.filename_base, stamp
        )
    return made
