"""The check of the libraries that compute kernels run in: FBGEMM, Numba and Triton."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterator

from shardwright.contracts.extension import Finding

_WITHOUT = "the project goes on without it, slower"


def kernel_libraries() -> Iterator[Finding]:
    """Look at FBGEMM, Numba and Triton: whether each can be imported, and goes with torch."""
    yield _numba()
    try:
        import torch
    except Exception:  # a finding of its own
        return
    yield _fbgemm(torch.__version__, torch.version.cuda or "")
    yield _triton(torch.version.cuda or "")


def _fbgemm(torch_version: str, cuda: str) -> Finding:
    from shardwright_plugins.compute_kernels import _fbgemm_check

    builds = _fbgemm_check.installed_builds()
    failure = _fbgemm_check.probe() if builds else None
    told = _fbgemm_check.diagnose(_fbgemm_check.Installed(torch_version, cuda, builds, failure))
    name, version = next(iter(builds.items()), ("fbgemm-gpu", ""))
    going_on = f"; {_WITHOUT}" if told.state == "broken" else ""
    return Finding("FBGEMM", name, version, told.state, told.reason + going_on, told.command)


def _numba() -> Finding:
    command = "pip install --upgrade 'numba>=0.60'"
    return _imported("Numba", "not installed; its CPU kernel is not offered", command, command)


def _triton(cuda: str) -> Finding:
    """Triton, which torch for CUDA brings; with it FBGEMM is not needed."""
    absent = "not installed; kernels in it are not offered (torch for CUDA brings it)"
    use = "lookups and updates on CUDA need no FBGEMM" if cuda else "this torch has no CUDA to use it"
    mend = "pip install --force-reinstall triton=={version}"
    return _imported("Triton", absent, "pip install triton" if cuda else "", mend, use)


def _imported(library: str, absent: str, bring: str, mend: str, use: str = "") -> Finding:
    """A library that is imported to see whether it works.

    Args:
        library: its name, also that of its module and distribution in small letters.
        absent: reason that is told where it is not installed.
        bring: command that installs it.
        mend: command that repairs it.
        use: purpose that is told where it works.
    """
    name = library.lower()
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(library, name, "", "absent", absent, bring)
    try:
        importlib.import_module(name)
    except Exception as error:  # one refuses a Python or NumPy that is too new, in several ways
        reason = f"it cannot be imported: {type(error).__name__}: {error}; {_WITHOUT}"
        return Finding(library, name, version, "broken", reason, mend.format(version=version))
    return Finding(library, name, version, reason=use)
