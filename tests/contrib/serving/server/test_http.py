"""The interface over HTTP, in this process."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="shardwright-serving needs FastAPI")

from fastapi.testclient import TestClient
from shardwright_serving.server.app import make_app
from shardwright_serving.server.settings import Settings
from tests.contrib.serving.server import small_packages as packages


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return packages.write_manifest(tmp_path / "package")


def client_of(package: Path, **settings: Any) -> TestClient:
    return TestClient(
        make_app(Settings(package, **{"loader": packages.LOADER, "poll_seconds": 0.01, **settings}))
    )


@pytest.fixture
def client(package: Path) -> Iterator[TestClient]:
    with client_of(package, max_batch=4, max_request_bytes=2000) as made:
        yield made


def test_prediction_is_the_programs(client: TestClient) -> None:
    request = packages.a_request(3, 0, 9)
    response = client.post("/predict", json=request)
    assert response.status_code == 200
    assert response.json() == {"version": "1", "outputs": packages.expected(request)}


def test_unfit_request_is_422_that_names_the_feature(client: TestClient) -> None:
    request = packages.a_request(1)
    request["features"]["user"] = [[packages.USERS]]
    response = client.post("/predict", json=request)
    assert response.status_code == 422
    assert response.json()["detail"] == [
        {"loc": ["features", "user", 0, 0], "msg": "feature 'user', sample 0: id 10 is not an id of 0 to 9"}
    ]


def test_large_body_is_413(client: TestClient) -> None:
    body = json.dumps(packages.a_request(1)).encode().ljust(2001)
    assert client.post("/predict", content=body[:2000]).status_code == 200
    response = client.post("/predict", content=body)
    assert response.status_code == 413
    assert response.json()["detail"] == "the body has 2001 bytes or more; at most 2000 are read"


def asked(package: Path, receive: Callable[[], Awaitable[dict[str, Any]]], **settings: Any) -> list[Any]:
    """Messages that the application sends to a client of which it receives something."""
    app = make_app(Settings(package, loader=packages.LOADER, **settings))
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def ask() -> None:
        scope = {"type": "http", "method": "POST", "path": "/predict", "headers": [], "query_string": b""}
        async with app.router.lifespan_context(app):
            await app({**scope, "client": ("10.0.0.7", 4711)}, receive, send)

    asyncio.run(asyncio.wait_for(ask(), 30))
    return sent


def of_client(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "10.0.0.7:4711" in record.getMessage()]


def test_body_of_unknown_length_is_read_no_further_than_it_may(
    package: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pieces = iter([bytes(1500)] * 100)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": next(pieces), "more_body": True}

    sent = asked(package, receive, max_request_bytes=2000)
    assert sent[0]["status"] == 413
    assert b"the body has 3000 bytes or more; at most 2000 are read" in sent[1]["body"]
    assert len(of_client(caplog)) == 1


def test_client_that_leaves_in_mid_body_is_one_line_and_no_error(
    package: Path, caplog: pytest.LogCaptureFixture
) -> None:
    messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> dict[str, Any]:
        return next(messages)

    assert asked(package, receive)[0]["status"] == 499
    assert of_client(caplog) == ["10.0.0.7:4711 left after 1 bytes of a body"]


def test_client_that_sends_too_slowly_is_408(package: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.05)
        return {"type": "http.request", "body": b" ", "more_body": True}

    sent = asked(package, receive, max_body_seconds=0.2)
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]
    assert len(of_client(caplog)) == 1


def test_many_samples_are_413(client: TestClient) -> None:
    response = client.post("/predict", json=packages.a_request(1, 1, 1, 1, 1))
    assert response.status_code == 413
    assert response.json()["detail"].startswith("5 samples in a request; at most 4 are taken")


def test_health_readiness_and_metrics_are_told(client: TestClient) -> None:
    assert client.get("/healthz").json() == {"status": "ok", "version": "1", "worker": os.getpid()}
    assert client.get("/readyz").json() == {"status": "ready", "version": "1"}
    client.post("/predict", json=packages.a_request(1, 2))
    client.post("/predict", json={})
    metrics = client.get("/metrics").text.splitlines()
    for line in (
        'shardwright_requests_total{code="200"} 1.0',
        'shardwright_requests_total{code="422"} 1.0',
        "shardwright_batch_samples_sum 2.0",
        "shardwright_queued_samples 0.0",
        'shardwright_workers{version="1"} 1.0',
    ):
        assert line in metrics


def test_schema_of_requests_is_that_of_the_package(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    schema = document["paths"]["/predict"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["features", "dense"]
    ids = document["components"]["schemas"]["Features"]["properties"]["item"]["items"]["items"]
    assert (ids["minimum"], ids["maximum"]) == (0, packages.ITEMS - 1)


def slow_program(folder: Path) -> Any:
    """Load a program whose call for a user 1 ends when the test lets it."""
    program = packages.load_small(folder)

    def waits(*inputs: Any) -> Any:
        if inputs[-1][0, 0] == 1:
            (folder.parent / "begun").touch()
            wait_for(folder.parent / "may_end")
        return program(*inputs)

    return waits


def wait_for(path: Path) -> None:
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_request_beyond_the_queue_is_503_with_a_time_to_come_again(package: Path) -> None:
    with (
        client_of(package, loader=f"{__name__}:slow_program", max_queue=1, max_wait_ms=0) as client,
        ThreadPoolExecutor(3) as threads,
    ):
        first = threads.submit(client.post, "/predict", json=packages.a_request(1))
        wait_for(package.parent / "begun")
        others = [threads.submit(client.post, "/predict", json=packages.a_request(2)) for _ in range(2)]
        refused = next(as_completed(others)).result()
        ready = client.get("/readyz")
        (package.parent / "may_end").touch()
        codes = sorted(future.result().status_code for future in [first, *others])
    assert codes == [200, 200, 503]
    for response in (ready, refused):
        assert response.status_code == 503
        assert int(response.headers["Retry-After"]) >= 1
    assert refused.json()["detail"] == "1 samples wait in this worker, and at most 1 may"


def until(client: TestClient, version: str) -> None:
    """Ask for predictions until they are those of a version; none may fail or be another's."""
    request = packages.a_request(3, 1)
    for _ in range(3000):
        response = client.post("/predict", json=request)
        assert response.status_code == 200
        answer = response.json()
        assert answer["outputs"] == packages.expected(request, float(answer["version"]))
        if answer["version"] == version:
            return
    raise AssertionError(f"version {version} was not taken")


def test_newer_package_is_taken_and_a_broken_one_is_not(tmp_path: Path, package: Path) -> None:
    link, second = tmp_path / "current", tmp_path / "second"
    link.symlink_to(package)
    broken = ({"version": "broken"}, {"version": "3", "outputs": packages.MANIFEST["outputs"][:1]})
    with client_of(link) as client:
        until(client, "1")
        newer = tmp_path / "newer"
        newer.symlink_to(packages.write_manifest(second, version="2"))
        newer.replace(link)
        until(client, "2")
        for count, changed in enumerate(broken, 1):
            packages.write_manifest(second, **changed)
            while f'loads_total{{result="failed"}} {count}.0' not in client.get("/metrics").text:
                until(client, "2")
        packages.write_manifest(second, version="4")
        until(client, "4")
        packages.write_manifest(second, version="4", outputs=packages.MANIFEST["outputs"])  # written anew
        while 'loads_total{result="taken"} 4.0' not in client.get("/metrics").text:
            until(client, "4")
        assert 'shardwright_workers{version="4"} 1.0' in client.get("/metrics").text


def test_package_that_changes_while_it_is_loaded_is_not_taken_half(
    tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of one version is never served under the manifest of another."""
    load, changes = packages.load_small, iter(["2", "3"])

    def replace(**changed: Any) -> None:
        made = packages.write_manifest(tmp_path / "made", **changed)
        (made / "package.json").replace(package / "package.json")

    def changing(folder: Path) -> Any:
        made = load(folder)
        for version in changes:
            replace(version=version)
            break
        return made

    with client_of(package) as client:
        until(client, "1")
        monkeypatch.setattr(packages, "load_small", changing)
        replace(version="1", created_with={"torch": "2"})
        until(client, "3")
        text = client.get("/metrics").text
    assert 'loads_total{result="failed"} 2.0' in text
    assert 'workers{version="2"}' not in text
