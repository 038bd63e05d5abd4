"""`shardwright doctor`: what is installed, whether it works together, and what would mend it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json as json_format
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import attrs
import typer

from shardwright.cli.quiet import quiet_host
from shardwright.cli.tables import page
from shardwright.errors import ShardwrightError, nearest

__all__ = ["doctor"]

_STYLES = {"absent": "dim", "off": "dim", "broken": "red"}
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


@attrs.frozen
class Finding:
    """One thing that was looked at.

    Attributes:
        part: area of the installation that it belongs to.
        name: name of the package, plugin or setting.
        found: version, number or value.
        state: `ok`; `absent` or `off`, which is no fault; or `broken`.
        reason: why it is not `ok`, or what is to be known of it.
        command: command that would mend it, or bring it; empty for nothing.
    """

    part: str
    name: str
    found: str = ""
    state: str = "ok"
    reason: str = ""
    command: str = ""


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Tell what is installed and whether it works together; exit code 1 if something does not."""
    findings = list(examine(os.environ))
    if json:
        typer.echo(json_format.dumps([attrs.asdict(finding) for finding in findings], indent=2))
    else:
        _print_table(findings)
        _print_verdict(findings)
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(1)


def examine(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Look at everything, in the order in which one thing needs another; what breaks one look does not end the rest.

    Args:
        environment: the environment variables.
    """
    looks: Sequence[tuple[str, Callable[[], Iterable[Finding]]]] = (
        ("python", _python),
        ("torch", _torch),
        ("FBGEMM", _fbgemm),
        ("Numba", _numba),
        ("Triton", _triton),
        ("devices", _devices),
        ("plugins", lambda: _plugins(environment)),
        ("comm backends", lambda: _comm_backends(environment)),
        ("environment", lambda: _variables(environment)),
    )
    for part, look in looks:
        if part in _OF_TORCH and not _is_imported("torch"):
            continue
        try:
            yield from look()
        except Exception as error:
            yield Finding(part, "", state="broken", reason=f"{type(error).__name__}: {error}")


def _is_imported(module: str) -> bool:
    """True if a module is there and could be imported: the look at it comes before those at what needs it."""
    return sys.modules.get(module) is not None


def _python() -> Iterator[Finding]:
    import shardwright

    yield Finding(
        "python", platform.python_implementation(), platform.python_version(), reason=sys.executable
    )
    folder = os.path.dirname(shardwright.__file__)
    yield Finding("shardwright", "shardwright", shardwright.__version__, reason=folder)


_OF_TORCH = ("FBGEMM", "Triton", "devices", "comm backends")
"""Parts that there is nothing to say of without torch."""


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
        wanted = (
            f"'torch=={torch.__version__.partition('+')[0]}' --index-url https://download.pytorch.org/whl/cpu"
        )
        yield Finding(
            "torch", "build for CPUs", "", "absent", reason, f"pip install --force-reinstall {wanted}"
        )


def _broken_torch(error: BaseException) -> Finding:
    """A torch that is there and cannot be imported, such as one whose libraries do not go with each other."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    reason = f"it cannot be imported: {type(error).__name__}: {error}; plans can be made without it, nothing trained"
    command = f"pip install --force-reinstall 'torch=={version}'" if version else ""
    return Finding("torch", "torch", version, "broken", reason, command)


def _fbgemm() -> Iterator[Finding]:
    import torch

    from shardwright.cli import fbgemm_check

    builds = fbgemm_check.installed_builds()
    failure = fbgemm_check.probe() if builds else None
    here = fbgemm_check.Installed(torch.__version__, torch.version.cuda or "", builds, failure)
    told = fbgemm_check.diagnose(here)
    name, version = next(iter(builds.items()), ("fbgemm-gpu", ""))
    going_on = "; the project goes on without it, slower" if told.state == "broken" else ""
    yield Finding("FBGEMM", name, version, told.state, told.reason + going_on, told.command)


def _numba() -> Iterator[Finding]:
    command = "pip install --upgrade 'numba>=0.60'"
    try:
        version = importlib.metadata.version("numba")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("Numba", "numba", "", "absent", "not installed; its CPU kernel is not offered", command)
        return
    try:
        importlib.import_module("numba")
    except Exception as error:  # it refuses a Python or NumPy that is too new, in several ways
        reason = (
            f"it cannot be imported: {type(error).__name__}: {error}; the project goes on without it, slower"
        )
        yield Finding("Numba", "numba", version, "broken", reason, command)
        return
    yield Finding("Numba", "numba", version)


def _triton() -> Iterator[Finding]:
    """Triton, which torch for CUDA brings; with it FBGEMM is not needed."""
    import torch

    command = "pip install triton" if torch.version.cuda else ""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        reason = "not installed; kernels in it are not offered (torch for CUDA brings it)"
        yield Finding("Triton", "triton", "", "absent", reason, command)
        return
    try:
        importlib.import_module("triton")
    except Exception as error:  # as with Numba, in several ways
        reason = (
            f"it cannot be imported: {type(error).__name__}: {error}; the project goes on without it, slower"
        )
        yield Finding(
            "Triton", "triton", version, "broken", reason, f"pip install --force-reinstall triton=={version}"
        )
        return
    use = (
        "lookups and updates on CUDA need no FBGEMM"
        if torch.version.cuda
        else "this torch has no CUDA to use it"
    )
    yield Finding("Triton", "triton", version, reason=use)


def _devices() -> Iterator[Finding]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("devices", "cpu", f"{cores} cores", reason=f"torch uses {torch.get_num_threads()} threads")
    yield _host_memory()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        built = f"; torch was built for CUDA {torch.version.cuda}" if torch.version.cuda else ""
        yield Finding("devices", "accelerator", "", "absent", f"torch sees none{built}")
        return
    count = torch.accelerator.device_count()
    yield Finding("devices", accelerator.type, f"{count} devices", reason=_memory_of(torch, accelerator.type))
    yield from _bandwidths(accelerator)


def _host_memory() -> Finding:
    from shardwright.runtime.ranks.detection.host_memory import host_memory_bytes

    found = host_memory_bytes()
    if found is None:
        return Finding(
            "devices", "host memory", "", "absent", "not detected: plans assume it or are given it"
        )
    reason = "detected: the machine's, or what a control group leaves of it"
    return Finding("devices", "host memory", f"{found / 2**30:.1f} GiB", reason=reason)


_LINKS_TOLD = {
    "hbm_mem_bw": "detected: by the device's attributes, or a timed copy",
    "hbm_to_ddr_mem_bw": "detected: a timed copy from page-locked host memory",
}


def _bandwidths(accelerator: Any) -> Iterator[Finding]:
    """Bandwidths of the device's memory and links, as plans are made with where no topology is given."""
    from shardwright.planning.assumptions import assumptions_of
    from shardwright.runtime.ranks.detection.detected import device_bandwidths
    from shardwright.runtime.ranks.devices import with_index

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


def _plugins(environment: Mapping[str, str]) -> Iterator[Finding]:
    from shardwright.host.settings import PLUGINS_VARIABLE

    host = quiet_host(environment)
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


def _comm_backends(environment: Mapping[str, str]) -> Iterator[Finding]:
    import torch.distributed as dist

    if not dist.is_available():
        yield Finding("comm backends", "", "", "absent", "this torch was built without torch.distributed")
        return
    backends = quiet_host(environment).comm_backends
    for name in sorted(backends):
        there = dist.is_backend_available(name)
        reason = "" if there else "this torch was built without it"
        devices = ", ".join(backends[name].devices)
        yield Finding("comm backends", name, devices, "ok" if there else "absent", reason)


def _variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    from shardwright.host.settings import PLUGINS_VARIABLE, PREFER_VARIABLE, STRICT_VARIABLE, PluginSettings

    readers: Mapping[str, Callable[[], Any]] = {
        **dict.fromkeys(
            (PLUGINS_VARIABLE, PREFER_VARIABLE, STRICT_VARIABLE), lambda: PluginSettings.read(environment)
        ),
        **_runtime_readers(environment),
    }
    for name, value in sorted(environment.items()):
        if name in _FOREIGN_VARIABLES:
            yield Finding("environment", name, value)
        elif name.startswith("SHARDWRIGHT_"):
            yield _variable(name, value, readers)


def _runtime_readers(environment: Mapping[str, str]) -> Mapping[str, Callable[[], Any]]:
    from shardwright.settings import CHECKS_VARIABLE, SHARED_MEMORY_VARIABLE, may_share_memory

    readers: dict[str, Callable[[], Any]] = {SHARED_MEMORY_VARIABLE: lambda: may_share_memory(environment)}
    if not _is_imported("torch"):
        return {**readers, CHECKS_VARIABLE: lambda: None}  # it is read where models are trained
    from shardwright.runtime.step.batches.inputs import InputChecks

    return {**readers, CHECKS_VARIABLE: lambda: InputChecks.of(None, environment)}


def _variable(name: str, value: str, readers: Mapping[str, Callable[[], Any]]) -> Finding:
    """A variable of shardwright's: known, and of a value that can be read."""
    if name not in readers:
        reason = f"no such variable. Known: {', '.join(sorted(readers))}.{nearest(name, readers)}"
        return Finding("environment", name, value, "broken", reason, f"unset {name}")
    try:
        readers[name]()
    except ShardwrightError as error:
        return Finding("environment", name, value, "broken", str(error), f"unset {name}")
    return Finding("environment", name, value)


def _print_table(findings: Sequence[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for header in ("part", "name", "found", "state", ""):
        table.add_column(header, overflow="fold")
    for finding in findings:
        cells = (finding.part, finding.name, finding.found, finding.state, finding.reason)
        table.add_row(*map(Text, cells), style=_STYLES.get(finding.state))
    page().print(table)


def _print_verdict(findings: Sequence[Finding]) -> None:
    """Print the verdict and the commands that would mend it; these are printed as they are, to be copied."""
    broken = [finding for finding in findings if finding.state == "broken"]
    typer.echo(f"\n{len(broken)} broken." if broken else "\nWhat is installed works together.")
    for finding in findings:
        if finding.command:
            purpose = "to mend" if finding.state == "broken" else "to have"
            typer.echo(f"{purpose} {finding.name}: {finding.command}")
