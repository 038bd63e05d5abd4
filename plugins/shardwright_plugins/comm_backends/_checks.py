"""The check of the backends of `torch.distributed` that comm backends serve."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.contracts.extension import Finding


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
        state, reason = "ok", ""
        if name not in dist.Backend.backend_list:
            reason = f"used where comm_backend={name!r} asks for it: torch has no process groups of this name"
        elif not dist.is_backend_available(name):
            state, reason = "absent", "this torch was built without it"
        yield Finding("comm backends", name, ", ".join(backends[name].devices), state, reason)
