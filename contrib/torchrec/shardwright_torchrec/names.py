"""`import torchrec` gives shardwright: TorchRec's module paths, served by an import hook.

A finder answers for `torchrec` and what is below it, and its modules look each name up in `shardwright` when it is
asked for, or in this package: quantized tables, and what is bent to TorchRec's ways. Once a
script imports one of the types, TorchScript and `torch.fx` take them.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import shardwright
from shardwright_torchrec._waiting import ROOT, VARIABLE, Waiting
from shardwright_torchrec.module_paths import ADAPTED, COLLECTIONS, MODULES, PATHS, QUANTIZED, SPARSE

_SCRIPTED = frozenset((*COLLECTIONS, *SPARSE))
_SCRIPTING = "shardwright_serving.scripting"


class _Names(ModuleType):
    """One of TorchRec's modules; its names are looked up in shardwright."""

    __version__ = f"shardwright {shardwright.__version__}"

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":  # `from ... import *`
            return _names(self.__name__)
        below = f"{self.__name__}.{name}"
        if below in PATHS and name not in _names(self.__name__):
            return importlib.import_module(below)
        return find(self.__name__, name)

    def __reduce__(
        self,
    ) -> tuple[Any, ...]:  # functions of a script's own module refer to it where they are sent
        return importlib.import_module, (self.__name__,)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_names(self.__name__)})


def find(module: str, name: str) -> Any:
    """The class, function or constant that has a name of TorchRec's; `torchrec` itself need not be served for that.

    Args:
        module: TorchRec's module path.
        name: name in it.

    Raises:
        AttributeError: shardwright has none there; the text says where, or names the nearest.
    """
    if name in MODULES.get(module, ()):
        if name in _SCRIPTED and is_installed():
            importlib.import_module(_SCRIPTING).install(lazily=True)  # not before: it imports torch
            _load_operators()
        return getattr(shardwright, name)
    if name in QUANTIZED.get(module, ()):
        return getattr(importlib.import_module("shardwright_torchrec.quant"), QUANTIZED[module][name])
    if (owner := _owner(module, name)) is not None:
        return getattr(*owner)
    hint = "" if name.startswith("__") else f" {_whereabouts(module, name)}"
    raise AttributeError(f"{module!r} is shardwright here, which has no {name!r} there.{hint}")


def _load_operators() -> None:
    """Load FBGEMM where it is installed: scripts that import TorchRec have `torch.ops.fbgemm` by that."""
    with suppress(ImportError, OSError):  # without it, or with one of another torch, what needs it says so
        importlib.import_module("fbgemm_gpu")


def _owner(module: str, name: str) -> tuple[ModuleType, str] | None:
    """The module of this package that has a name of TorchRec's, and what it is called there; none if it is not here."""
    if name not in ADAPTED.get(module, ()):
        return None
    own, _, there = ADAPTED[module][name].partition(":")
    return importlib.import_module(f"shardwright_torchrec.{own}"), there or name


class _Finder(MetaPathFinder, Loader):
    """Answers every import of `torchrec` and below, so that two libraries never mix."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The spec of one of `MODULES`; none for what is not TorchRec's.

        Raises:
            ModuleNotFoundError: It is TorchRec's, and shardwright has nothing for it.
        """
        if fullname.partition(".")[0] != ROOT:
            return None
        if fullname not in PATHS:
            raise ModuleNotFoundError(
                f"{ROOT!r} is shardwright here, which has nothing for {fullname!r}.{_nearest(fullname, PATHS)} "
                f"shardwright_torchrec.uninstall() gives the name back to TorchRec.",
                name=fullname,
            )
        is_package = any(other.startswith(f"{fullname}.") for other in PATHS)
        return ModuleSpec(fullname, self, origin="shardwright_torchrec", is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module that knows where its names are."""
        return _Names(spec.name, f"shardwright under the name {spec.name}.")

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is to be run: names are looked up when they are asked for."""


_finder = _Finder()


def install() -> None:
    """Let `import torchrec`, and the modules below it, give shardwright in this process and those that it starts.

    Call it before anything imports `torchrec`. A second call does nothing. Processes that are started from here learn
    of it by the variable `SHARDWRIGHT_TORCHREC`, where this distribution is installed.

    Raises:
        ImportError: TorchRec itself was imported already.
    """
    if is_installed():
        return
    imported = sys.modules.get(ROOT)
    if imported is not None:
        file = getattr(imported, "__file__", None)
        raise ImportError(
            f"TorchRec itself was imported already, from {file}: its classes are in use. "
            "Call shardwright_torchrec.install() before the first `import torchrec`."
        )
    sys.meta_path.insert(0, _finder)
    os.environ[VARIABLE] = "1"


def uninstall() -> None:
    """Give the name `torchrec` back; what was imported under it stays usable."""
    if is_installed():
        sys.meta_path.remove(_finder)
        if (scripting := sys.modules.get(_SCRIPTING)) is not None:
            scripting.uninstall()
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not Waiting]
    os.environ.pop(VARIABLE, None)
    for name in list(_imported()):
        del sys.modules[name]


def find_spec(name: str) -> ModuleSpec | None:
    """The spec of one of TorchRec's modules, as shardwright serves it."""
    return _finder.find_spec(name)


def is_installed() -> bool:
    """True if `import torchrec` gives shardwright."""
    return _finder in sys.meta_path


def _imported() -> Iterator[str]:
    return (name for name, module in list(sys.modules.items()) if isinstance(module, _Names))


def _whereabouts(module: str, name: str) -> str:
    """Name the modules that have a name, or the names of a module with the nearest."""
    elsewhere = [path for path in PATHS if name in _names(path)]
    if elsewhere:
        return f"It is in {', '.join(elsewhere)}."
    return f"Known: {', '.join(sorted(_names(module))) or 'none'}.{_nearest(name, _names(module))}"


def _names(path: str) -> list[str]:
    """All names in one of the modules."""
    return [*MODULES.get(path, ()), *QUANTIZED.get(path, ()), *ADAPTED.get(path, ())]


def _nearest(name: str, known: Sequence[str] | Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
