"""The check of the backends of `torch.distributed` that comm backends serve."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.contracts.extension import Finding

__all__ = ["comm_backends"]


def comm_backends() -> Iterator[Finding]:
    """Look at the comm backends that plugins offer: whether torch was built with each."""
    try:
        import torch.distributed as dist
    except Exception:  # a finding of its own
        return
    from shardwright.host.plugin_host import host

    if not dist.is_available():
        yield Finding("comm backends", "", "", "absent", "this torch was built without torch.distributed")
        return
    backends = host().comm_backends
    for name in sorted(backends):
        there = dist.is_backend_available(name)
        reason = "" if there else "this torch was built without it"
        devices = ", ".join(backends[name].devices)
        yield Finding("comm backends", name, devices, "ok" if there else "absent", reason)
