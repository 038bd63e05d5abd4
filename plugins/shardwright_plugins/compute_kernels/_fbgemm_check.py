"""Compatibility of the installed FBGEMM with the installed torch, and the command that would mend it.

FBGEMM's operators are compiled against one minor release of torch: with another, its libraries have undefined symbols
or crash. Source of the pairs: FBGEMM's releases, which count with torch's (2.5 with 1.0, 2.6 with 1.1, 2.13 with 1.8).
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Mapping

import attrs

_BUILDS = ("fbgemm-gpu", "fbgemm-gpu-cpu", "fbgemm-gpu-genai", "fbgemm-gpu-nightly", "fbgemm-gpu-nightly-cpu")
_FIRST_TORCH_MINOR = 5
_PROBE_TIMEOUT_S = 120.0
_PROBE = "import json; from shardwright import _fbgemm; print('\\n' + json.dumps(_fbgemm.reason()))"
_LOAD_ERRORS = (
    (
        r"undefined symbol",
        "it was compiled against another torch: its libraries ask for functions that this one lacks",
    ),
    (r"lib(cuda|cudart|nvrtc|cublas)\S*", "it was compiled for CUDA, whose libraries are not here"),
    (r"lib(amdhip|hsa|roc)\S*", "it was compiled for ROCm, whose libraries are not here"),
    (r"GLIBC|GLIBCXX", "it was compiled for a newer system than this one"),
    (r"registered|already", "two builds of its operators are loaded, each of which registers them"),
    (r"No module named 'fbgemm_gpu'", "its metadata is there, its modules are not: it was removed in part"),
    (r"object has no attribute", "it loads, but its operators are not those of its own release"),
)
"""Texts in the error of an import -> what they mean."""


@attrs.frozen
class Installed:
    """Installed versions of torch and FBGEMM.

    Attributes:
        torch: torch's version, with its local tag (`2.13.0+cpu`).
        cuda: the version of CUDA that torch was built for; empty for none.
        builds: FBGEMM's distributions -> their versions.
        failure: the error that importing FBGEMM ends with; None if it is usable.
    """

    torch: str
    cuda: str
    builds: Mapping[str, str]
    failure: str | None


@attrs.frozen
class Diagnosis:
    """Verdict on FBGEMM: its state (`ok`, `absent` or `broken`), the reason, and the command that would mend it."""

    state: str
    reason: str
    command: str


def goes_with(torch_version: str) -> str | None:
    """The release of FBGEMM for a release of torch.

    Args:
        torch_version: such as `"2.13.0+cpu"`.

    Returns:
        Such as `"1.8"`; None where the rule does not reach.
    """
    found = re.match(r"2\.(\d+)", torch_version)
    if found is None or int(found[1]) < _FIRST_TORCH_MINOR:
        return None
    return f"1.{int(found[1]) - _FIRST_TORCH_MINOR}"


def diagnose(here: Installed) -> Diagnosis:
    """Say whether FBGEMM can be used with this torch, why not, and the command that would mend it."""
    wanted = goes_with(here.torch)
    command = _install_command(here, wanted)
    if not here.builds:
        return Diagnosis("absent", "not installed; lookups and updates run in other kernels", command)
    listed = ", ".join(f"{name} {version}" for name, version in sorted(here.builds.items()))
    if len(here.builds) > 1:
        reason = f"{listed} are installed together, and overwrite each other's files"
        return Diagnosis("broken", reason, _replace_command(here, command))
    (version,) = here.builds.values()
    reasons = []
    if wanted and _minor(version) != wanted:
        reasons.append(f"{listed} does not go with torch {here.torch}, which {wanted} goes with")
    if here.failure is not None:
        reasons.append(f"it cannot be loaded: {_explained(here.failure)}")
    if reasons:
        return Diagnosis("broken", "; ".join(reasons), _replace_command(here, command))
    return Diagnosis("ok", "", "")


def installed_builds() -> dict[str, str]:
    """FBGEMM's distributions that are installed, with their versions."""
    found = {}
    for name in _BUILDS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def probe(timeout_s: float = _PROBE_TIMEOUT_S) -> str | None:
    """Import FBGEMM in a process of its own, since a build that does not fit may take its process down.

    Returns:
        Why it cannot be used; None if it can.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return f"TimeoutError: its import had not ended after {timeout_s:g} s"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return f"its import ended the process with {_exit(done.returncode)}{f' ({last})' if last else ''}"
    reason = json.loads(done.stdout.strip().splitlines()[-1])
    return None if reason is None else str(reason)


def _exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _explained(failure: str) -> str:
    meant = [meaning for pattern, meaning in _LOAD_ERRORS if re.search(pattern, failure)]
    return f"{meant[0]} ({failure})" if meant else failure


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _install_command(here: Installed, wanted: str | None) -> str:
    """The build for torch's devices and release, from where that torch came from."""
    name = "fbgemm-gpu" if here.cuda else "fbgemm-gpu-cpu"
    pinned = f"'{name}=={wanted}.*'" if wanted else name
    tag = here.torch.partition("+")[2]
    index = (
        f" --index-url https://download.pytorch.org/whl/{tag}" if here.cuda and tag.startswith("cu") else ""
    )
    return f"pip install {pinned}{index}"


def _replace_command(here: Installed, command: str) -> str:
    """The two builds install the same files: what is there must go first."""
    return f"pip uninstall --yes {' '.join(sorted(here.builds))} && {command}"
