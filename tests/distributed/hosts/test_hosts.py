"""Two hosts with addresses of their own: network namespaces joined by a wire."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.distributed.hosts.host_rank import CASE, INTERFACE
from tests.equality import assert_equals_unsharded

pytestmark = pytest.mark.distributed

TIMEOUT_S = 300


def ip(*arguments: str) -> None:
    """Run the tool that makes namespaces; skip the test where it may not."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces cannot be made here: there is no `ip`")
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
    if done.returncode:
        pytest.skip(
            f"network namespaces cannot be made here: ip {' '.join(arguments)}: {done.stderr.strip()}"
        )


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The names of two namespaces with an address each, on the two ends of a wire."""
    names = [f"shardwright-{os.getpid()}-{host}" for host in range(2)]
    made = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ends = [f"sw{os.getpid() % 100000}-{host}" for host in range(2)]
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host, (name, end) in enumerate(zip(names, ends, strict=True)):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "link", "set", end, "name", INTERFACE)
            ip("-n", name, "address", "add", f"10.231.0.{host + 1}/24", "dev", INTERFACE)
            ip("-n", name, "link", "set", INTERFACE, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=False, timeout=20)


def start(host: str, rank: int, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.distributed.hosts.host_rank", str(rank), str(folder / "store")]
    return subprocess.Popen(
        ["ip", "netns", "exec", host, *command, str(folder / f"result{rank}")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["", *sys.path])},
        cwd=Path(__file__).parents[3],
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_all_types_on_two_hosts_with_addresses_of_their_own_equal_unsharded(
    hosts: list[str], tmp_path: Path
) -> None:
    ranks = [start(hosts[rank // 2], rank, tmp_path) for rank in range(CASE.world_size)]
    try:
        errors = [rank.communicate(timeout=TIMEOUT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(timeout=10)
    assert [rank.returncode for rank in ranks] == [0] * CASE.world_size, "\n".join(errors)
    pickles = [(tmp_path / f"result{rank}").read_bytes() for rank in range(CASE.world_size)]
    trained, sent_bytes = zip(*map(pickle.loads, pickles), strict=True)
    assert_equals_unsharded(CASE, trained)
    assert min(sent_bytes) > 10_000  # it did go over the wire
