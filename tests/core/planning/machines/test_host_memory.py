"""Host memory: the machine's, or what control groups of either version leave of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwright.planning.machines.host_memory import host_memory_bytes

TOTAL = 64 << 30


def machine(root: Path, groups: str, limits: dict[str, str]) -> Path:
    """A machine whose control groups have these limits, by file below `/sys/fs/cgroup`."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in limits.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/\n", {}, TOTAL),
        ("0::/\n", {"memory.max": "max"}, TOTAL),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": str(8 << 30)}, 8 << 30),
        ("0::/pod\n", {"memory.max": str(4 << 30)}, 4 << 30),  # a container that does not see its own path
        ("9:name=systemd:/\n4:memory:/job\n", {"memory/job/memory.limit_in_bytes": str(2 << 30)}, 2 << 30),
        ("4:cpu,memory:/\n", {"memory/memory.limit_in_bytes": str((1 << 63) - 4096)}, TOTAL),  # no limit
    ],
)
def test_host_memory_is_the_least_of_machine_and_groups(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str,
    limits: dict[str, str],
    expected: int,
) -> None:
    told = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": TOTAL // 4096}
    monkeypatch.setattr(os, "sysconf", told.__getitem__)
    assert host_memory_bytes(machine(tmp_path, groups, limits)) == expected


def test_host_memory_of_this_machine_is_found_without_proc_too(tmp_path: Path) -> None:
    here, by_posix = host_memory_bytes(), host_memory_bytes(tmp_path)
    assert here
    assert by_posix
    assert here <= by_posix
