"""The server with its worker processes, under load: nothing is lost but what a killed worker had taken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

pytest.importorskip("fastapi", reason="shardwright-serving needs FastAPI")

import httpx2
from tests.contrib import distributions
from tests.contrib.serving.server import small_packages as packages
from tests.ports import own_port

pytestmark = pytest.mark.slow
WAIT_S = 200
"""Longest wait for anything of the server; two workers import torch in it on a busy machine."""
THREADS = 4


@contextmanager
def server(package: Path, *arguments: str, log: IO[str] | None = None) -> Iterator[str]:
    """Start a server of two workers, and end it: by its own doing, without an error."""
    port = own_port()
    command = [sys.executable, "-m", "shardwright_serving", str(package), "--port", str(port)]
    options = ["--workers", "2", "--poll-seconds", "0.1", "--loader", packages.LOADER, *arguments]
    root = distributions.ROOT
    path = os.pathsep.join([str(root / "serving"), str(root.parent), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen([*command, *options], env={**os.environ, "PYTHONPATH": path}, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait(WAIT_S)


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def metric(url: str, line: str) -> Callable[[], bool]:
    """Make a test of a line of the server's metrics."""

    def is_there() -> bool:
        try:
            return line in httpx2.get(f"{url}/metrics").text.splitlines()
        except httpx2.TransportError:
            return False

    return is_there


class Load:
    """Requests from several threads at once, each checked."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(index,)) for index in range(THREADS)]
        self.answered = [0] * THREADS
        self.versions: list[list[str]] = [[] for _ in range(THREADS)]
        self.lost: list[str] = []
        self.wrong: list[Any] = []

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(WAIT_S)

    def goes_on(self) -> None:
        """Wait until each thread has been answered ten times more."""
        before = list(self.answered)
        until(lambda: all(now >= then + 10 for now, then in zip(self.answered, before, strict=True)))

    def _ask(self, index: int) -> None:
        while not self._is_over.is_set():
            try:
                with httpx2.Client(timeout=WAIT_S) as client:  # one connection, and so one worker
                    self._ask_one_worker(client, index)
            except httpx2.TransportError as error:
                self.lost.append(repr(error))

    def _ask_one_worker(self, client: httpx2.Client, index: int) -> None:
        for number in range(50):
            if self._is_over.is_set():
                return
            request = packages.a_request(index, number % 10)
            response = client.post(f"{self._url}/predict", json=request)
            answer = response.json()
            if response.status_code != 200 or answer["outputs"] != packages.expected(
                request, float(answer["version"])
            ):
                self.wrong.append((response.status_code, answer))
                continue
            self.versions[index].append(answer["version"])
            self.answered[index] += 1


def test_killed_worker_loses_its_own_requests_only_and_is_replaced(tmp_path: Path) -> None:
    with server(packages.write_manifest(tmp_path)) as url:
        until(metric(url, 'shardwright_workers{version="1"} 2.0'))
        with Load(url) as load:
            load.goes_on()
            os.kill(httpx2.get(f"{url}/healthz").json()["worker"], signal.SIGKILL)
            load.goes_on()
            until(metric(url, 'shardwright_workers{version="1"} 2.0'))
            until(metric(url, 'shardwright_package_loads_total{result="taken"} 3.0'))
            load.goes_on()
    assert load.wrong == []
    assert len(load.lost) <= THREADS  # each thread has one request under way


def test_newer_packages_are_taken_without_losing_a_request(tmp_path: Path) -> None:
    first, second, third = (packages.write_manifest(tmp_path / version, version=version) for version in "123")
    current = tmp_path / "current"
    current.symlink_to(first)
    with server(current) as url:
        until(metric(url, 'shardwright_workers{version="1"} 2.0'))
        with Load(url) as load:
            load.goes_on()
            newer = tmp_path / "newer"
            newer.symlink_to(second)
            newer.replace(current)  # the link moves
            until(metric(url, 'shardwright_workers{version="2"} 2.0'))
            load.goes_on()
            second.rename(tmp_path / "older")  # the folder is replaced, and for a moment there is none
            third.rename(second)
            until(metric(url, 'shardwright_workers{version="3"} 2.0'))
            load.goes_on()
    assert (load.wrong, load.lost) == ([], [])
    for versions in load.versions:
        assert set(versions) == {"1", "2", "3"}


def test_worker_that_starts_beside_a_broken_package_leaves_requests_to_the_others(tmp_path: Path) -> None:
    with server(packages.write_manifest(tmp_path)) as url:
        until(metric(url, 'shardwright_workers{version="1"} 2.0'))
        packages.write_manifest(tmp_path, version="broken")
        os.kill(httpx2.get(f"{url}/healthz").json()["worker"], signal.SIGKILL)
        with Load(url) as load:
            until(metric(url, 'shardwright_workers{version="1"} 1.0'))
            load.goes_on()
            packages.write_manifest(tmp_path, version="2")
            until(metric(url, 'shardwright_workers{version="2"} 2.0'))
            load.goes_on()
    assert load.wrong == []
    assert len(load.lost) <= THREADS


@pytest.mark.parametrize(
    ("version", "code", "message"),
    [(None, 2, "no package in"), ("broken", 3, "could not convert string to float: 'broken'")],
)
def test_server_without_a_package_that_loads_ends_with_a_sentence(
    tmp_path: Path, version: str | None, code: int, message: str
) -> None:
    if version is not None:
        packages.write_manifest(tmp_path, version=version)
    root = distributions.ROOT
    command = [sys.executable, "-m", "shardwright_serving", str(tmp_path), "--port", str(own_port())]
    done = subprocess.run(
        [*command, "--loader", packages.LOADER],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "serving"), str(root.parent)])},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
