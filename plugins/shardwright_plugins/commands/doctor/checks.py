"""The checks of what every part needs: Python, torch, devices, plugins and environment variables."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pkgutil import resolve_name
from typing import Any

from shardwright.cli.quiet import quiet_host
from shardwright.contracts.extension import Finding
from shardwright.errors import ShardwrightError, nearest

_FOREIGN_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NUMBA_NUM_THREADS",
    "OMP_NUM_THREADS",
    "RANK",
    "WORLD_SIZE",
)
"""Variables of others that change what a job does."""
_SETTINGS = "shardwright.host.settings:PluginSettings.read"
_PARTS = "shardwright_plugins"
_READERS: Mapping[str, tuple[Any, ...]] = {
    "SHARDWRIGHT_COMPARE_REPLICAS_EVERY": (f"{_PARTS}.guards._replicas:passes_between",),
    "SHARDWRIGHT_INPUT_CHECKS": ("shardwright.runtime.step.batches.inputs:InputChecks.of", None),
    "SHARDWRIGHT_MAPPED_FOLDER": (f"{_PARTS}.compute_kernels.row_cache.memory:mapped_folder",),
    "SHARDWRIGHT_PLUGINS": (_SETTINGS,),
    "SHARDWRIGHT_PREFER": (_SETTINGS,),
    "SHARDWRIGHT_SHARED_MEMORY": (f"{_PARTS}.comm_backends.settings:may_share_memory",),
    "SHARDWRIGHT_STRICT_PLUGINS": (_SETTINGS,),
}
"""Variable -> the function that reads it from an environment, and what it takes before that."""
_MISSPELT = 0.9
"""Likeness of names (``difflib``) above which one is a slip of the other: variables share their first letters."""


def has_torch() -> bool:
    """True if torch can be imported: without it some checks have nothing to say, and :func:`python` says why."""
    try:
        import torch  # noqa: F401
    except Exception:
        return False
    return True


def python() -> Iterator[Finding]:
    """Look at Python, shardwright and torch."""
    import shardwright

    name, version = platform.python_implementation(), platform.python_version()
    yield Finding("python", name, version, reason=sys.executable)
    folder = os.path.dirname(shardwright.__file__)
    yield Finding("shardwright", "shardwright", shardwright.__version__, reason=folder)
    yield from _torch()


def _torch() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        reason = "not installed; plans can be made and checked without it, nothing can be trained"
        yield Finding("torch", "torch", "", "absent", reason, "pip install 'shardwright[cpu]'")
        return
    try:
        import torch
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        yield _broken_torch(error)
        return
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
    yield Finding("torch", "torch", torch.__version__, reason=f"built for {built_for}")
    if torch.version.cuda and not torch.accelerator.is_available():
        reason = (
            f"torch sees no GPU, and was built for {built_for}, whose libraries take gigabytes; PyTorch's build for "
            "CPUs does the same here"
        )
        version = torch.__version__.partition("+")[0]
        command = f"pip install --force-reinstall 'torch=={version}' --index-url https://download.pytorch.org/whl/cpu"
        yield Finding("torch", "build for CPUs", "", "absent", reason, command)


def _broken_torch(error: BaseException) -> Finding:
    """A torch that is there and cannot be imported, such as one whose libraries do not go with each other."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    reason = f"it cannot be imported: {type(error).__name__}: {error}; plans can be made without it, nothing trained"
    command = f"pip install --force-reinstall 'torch=={version}'" if version else ""
    return Finding("torch", "torch", version, "broken", reason, command)


def devices() -> Iterator[Finding]:
    """Look at the processor, the accelerators, their memory and bandwidths."""
    if not has_torch():
        return
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("devices", "cpu", f"{cores} cores", reason=f"torch uses {torch.get_num_threads()} threads")
    yield _host_memory()
    yield _machine()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        built = f"; torch was built for CUDA {torch.version.cuda}" if torch.version.cuda else ""
        yield Finding("devices", "accelerator", "", "absent", f"torch sees none{built}")
        return
    count = torch.accelerator.device_count()
    found = f"{count} device{'s' * (count != 1)}"
    yield Finding("devices", accelerator.type, found, reason=_memory_of(torch, accelerator.type))
    yield from _bandwidths(accelerator)


def _host_memory() -> Finding:
    from shardwright.planning.machines.host_memory import host_memory_bytes

    found = host_memory_bytes()
    if found is None:
        return Finding(
            "devices", "host memory", "", "absent", "not detected: plans assume it or are given it"
        )
    reason = "detected: the machine's, or what a control group leaves of it"
    return Finding("devices", "host memory", f"{found / 2**30:.1f} GiB", reason=reason)


def _machine() -> Finding:
    """The machine whose constants `engine` plans by where none is named: this one, or another."""
    from shardwright_plugins.estimators.engine.machine import nearest_machine, shipped_machine
    from shardwright_plugins.measuring.processor import processor

    here = processor()
    made = shipped_machine(nearest_machine(here)).made
    if made["processor"] == here:
        reason = f"measured on {made['date']}; engine plans CPUs by it"
        return Finding("devices", "machine", made["processor"], reason=reason)
    reason = f"engine plans CPUs by constants of {made['processor']}; this is another processor: {here}"
    return Finding(
        "devices", "machine", "", "absent", reason, "shardwright calibrate --output machine.json --ranks 2"
    )


_LINKS_TOLD = {
    "hbm_mem_bw": "detected: by the device's attributes, or a timed copy",
    "hbm_to_ddr_mem_bw": "detected: a timed copy from page-locked host memory",
}


def _bandwidths(accelerator: Any) -> Iterator[Finding]:
    """Bandwidths of the device's memory and links, as plans are made with where no topology is given."""
    from shardwright.planning.assumptions import assumptions_of
    from shardwright.runtime.ranks.devices import with_index
    from shardwright_plugins.bandwidths.measured import device_bandwidths

    found = device_bandwidths(with_index(accelerator))
    for name, value in found.items():
        yield Finding("devices", name, _per_second(value), reason=_LINKS_TOLD[name])
    assumed = assumptions_of(accelerator.type)
    for name in ("intra_host_bw", "inter_host_bw"):
        reason = f"assumed ({assumed[name].source}); collective_plan measures it between the ranks of a job"
        yield Finding("devices", name, _per_second(assumed[name].value), reason=reason)


def _per_second(bytes_per_ms: float) -> str:
    return f"{bytes_per_ms * 1000 / 2**30:.0f} GiB/s"


def _memory_of(torch: Any, kind: str) -> str:
    """The names and memories of the accelerators, where torch tells them."""
    module: Any = getattr(torch, kind, None)
    if not hasattr(module, "get_device_properties"):
        return ""
    found = [module.get_device_properties(index) for index in range(torch.accelerator.device_count())]
    return ", ".join(f"{one.name} with {one.total_memory / 2**30:.1f} GiB" for one in found)


def plugins() -> Iterator[Finding]:
    """Look at the plugins that are installed."""
    from shardwright.host.settings import PLUGINS_VARIABLE

    host = quiet_host(os.environ)
    for record in host.plugins:
        origin, state = (
            record.provenance,
            {"loaded": "ok", "failed": "broken"}.get(record.state, record.state),
        )
        offered = ", ".join(sorted(entry.name for entries in record.entries.values() for entry in entries))
        command = f"export {PLUGINS_VARIABLE}=-{origin.plugin}" if state == "broken" else ""
        package = f"{origin.distribution} {origin.version}".strip()
        yield Finding("plugins", origin.plugin, package, state, record.reason or offered, command)
    for registry in host.registries:
        for name, error in registry.conflicts.items():
            yield Finding("plugins", name, registry.kind.title, "broken", str(error))


def environment() -> Iterator[Finding]:
    """Look at environment variables that shardwright and its libraries read."""
    for name, value in sorted(os.environ.items()):
        if name in _FOREIGN_VARIABLES:
            yield Finding("environment", name, value)
        elif name.startswith("SHARDWRIGHT_"):
            yield _variable(name, value)


def _variable(name: str, value: str) -> Finding:
    """A variable of shardwright's: known, and of a value that can be read; or one that a plugin may read."""
    if name not in _READERS:
        known = f"Known: {', '.join(sorted(_READERS))}."
        if get_close_matches(name, _READERS, cutoff=_MISSPELT):
            reason = f"no such variable. {known}{nearest(name, _READERS)}"
            return Finding("environment", name, value, "broken", reason, f"unset {name}")
        return Finding("environment", name, value, "ok", f"no built-in part reads it; a plugin may. {known}")
    target, *further = _READERS[name]
    try:
        with suppress(ImportError):  # without torch, nothing is read that needs it
            resolve_name(target)(*further, os.environ)
    except ShardwrightError as error:
        return Finding("environment", name, value, "broken", str(error), f"unset {name}")
    return Finding("environment", name, value)
