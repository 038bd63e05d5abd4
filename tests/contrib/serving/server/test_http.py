"""Requests, how they are joined into batches, and the interface over HTTP, in this process."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="shardwright-serving needs FastAPI")

import numpy as np
from fastapi.testclient import TestClient
from shardwright_serving.packages.manifest import Manifest, PackageError
from shardwright_serving.server.app import make_app
from shardwright_serving.server.batcher import Batcher, PredictionError
from shardwright_serving.server.metrics import Metrics
from shardwright_serving.server.requests import RequestReader, UnfitRequestError
from shardwright_serving.server.samples import Samples, joined
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


@pytest.fixture
def reader(tmp_path: Path) -> RequestReader:
    return RequestReader(Manifest.read(packages.write_manifest(tmp_path)))


def test_request_becomes_arrays_feature_after_feature(reader: RequestReader) -> None:
    samples = reader.read(json.dumps(packages.a_request(2, 0, 1)).encode())
    assert len(samples) == 3
    assert samples.lengths.tolist() == [[1, 1, 1], [2, 0, 1]]
    assert [ids.tolist() for ids in samples.ids] == [[2, 0, 1], [0, 1, 0]]
    assert [weights.tolist() for weights in samples.weights] == [[1, 1, 1], [0.5, 0.5, 0.5]]
    assert samples.dense is not None
    assert samples.dense.tolist() == [[2, -1], [0, -1], [1, -1]]


def test_requests_are_joined_in_order_within_each_feature(reader: RequestReader) -> None:
    apart = [reader.read(json.dumps(packages.a_request(*users)).encode()) for users in ((2, 0), (1,), (3,))]
    together = reader.read(json.dumps(packages.a_request(2, 0, 1, 3)).encode())
    for one, other in zip(joined(apart), joined([together]), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype


def changed(path: str, value: Any) -> str:
    """Change one place of a good request of three samples."""
    request: Any = packages.a_request(2, 0, 1)
    *above, last = path.split("/")
    place = request
    for key in above:
        place = place[int(key) if isinstance(place, list) else key]
    if value is None:
        del place[last]
    else:
        place[int(last) if isinstance(place, list) else last] = value
    return json.dumps(request)


@pytest.mark.parametrize(
    ("body", "loc", "message"),
    [
        (changed("features/user/1/0", 10), "features user 1 0", "feature 'user', sample 1: id 10 is not an id of 0 to"),
        (changed("features/item/0/1", -1), "features item 0 1", "feature 'item', sample 0: id -1 is not an id of 0 to"),
        (changed("features/item/0/1", 10**30), "features item 0 1", f"feature 'item', sample 0: id {10**30} is not"),
        (changed("features/user/1/0", "7"), "features user 1 0", "feature 'user', ids of sample 1: input should be"),
        (changed("features/user/1/0", 1.5), "features user 1 0", "feature 'user', ids of sample 1: input should be"),
        (changed("features/user/1", 3), "features user 1", "feature 'user', ids of sample 1: input should be"),
        (changed("features/user", None), "features user", "feature 'user' is missing"),
        (changed("features/usr", [[1]]), "features usr", "unknown feature 'usr'; known: user, item"),
        (changed("features/user", [[1]]), "features item", "feature 'item' has 3 samples; feature 'user' has 1"),
        (changed("dense", [[1, 2]]), "dense", "dense has 1 samples; feature 'user' has 3"),
        (changed("dense/1", [1]), "dense 1", "dense, sample 1: list should have at least 2 items"),
        (changed("dense/1/0", float("nan")), "dense 1 0", "dense, sample 1: input should be a finite number"),
        (changed("dense/1/0", 1e39), "dense", "dense has a number that is not finite as a float32"),
        (changed("dense", None), "dense", "dense: field required"),
        (changed("weights", None), "weights item", "feature 'item' needs a weight for each id"),
        (changed("weights/user", [[1]]), "weights user", "feature 'user' takes no weights"),
        (changed("weights/itm", [[1]]), "weights itm", "unknown feature 'itm'; known: user, item"),
        (changed("weights/item", [[1]]), "weights item", "feature 'item' has 3 samples and weights for 1"),
        (changed("weights/item/0", [1]), "weights item 0", "feature 'item' has 2 ids in sample 0 and 1 weights"),
        (changed("weights/item/0/0", float("inf")), "weights item 0 0", "feature 'item', weights of sample 0: input"),
        (changed("weights/item/0/0", 1e39), "weights item", "feature 'item' has a number that is not finite"),
        (changed("extra", 1), "extra", "unknown key 'extra'; known: features, weights, dense"),
        ('{"features": {"user": [], "item": []}, "dense": []}', "features", "the request has no samples"),
        (
            '{"features": {"user": [[1]], "item": [[]], "user": [[2]]}, "dense": [[0, 0]]}',
            "user",
            "'user' is there 2 times; which one is meant?",
        ),
        (
            '{"features": {"user": [[1]], "item": [[]]}, "dense": [[0, 0]], "d\\u0065nse": [[1, 0]]}',
            "dense",
            "'dense' is there 2 times",
        ),
        ("{", "", "invalid JSON"),
        ("[]", "", "input should be an object"),
    ],
)  # fmt: skip
def test_unfit_request_is_refused_naming_the_feature(
    reader: RequestReader, body: str, loc: str, message: str
) -> None:
    with pytest.raises(UnfitRequestError) as caught:
        reader.read(body.encode())
    problem = caught.value.problems[0]
    assert " ".join(map(str, problem["loc"])) == loc
    assert problem["msg"].startswith(message)


def test_feature_that_is_not_required_is_empty_where_it_is_missing(tmp_path: Path) -> None:
    features = [{**one, "required": False} for one in packages.MANIFEST["features"]]
    reader = RequestReader(Manifest.read(packages.write_manifest(tmp_path, features=features)))
    samples = reader.read(b'{"features": {"user": [[3], [4]]}, "dense": [[0, 0], [0, 0]]}')
    assert samples.lengths.tolist() == [[1, 1], [0, 0]]
    assert reader.read(b'{"features": {}, "dense": [[0, 0]]}').lengths.tolist() == [[0], [0]]


def test_feature_without_a_table_size_takes_any_id(tmp_path: Path) -> None:
    features = [{"name": "any", "num_embeddings": None}]
    reader = RequestReader(Manifest.read(packages.write_manifest(tmp_path, features=features, dense=None)))
    samples: Samples = reader.read(b'{"features": {"any": [[-9223372036854775808, 9223372036854775807]]}}')
    assert samples.ids[0].tolist() == [-(2**63), 2**63 - 1]
    assert (samples.weights, samples.dense) == ((), None)
    with pytest.raises(UnfitRequestError, match="is not a signed integer of 64 bits"):
        reader.read(b'{"features": {"any": [[9223372036854775808]]}}')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no package in"),
        ("{", "cannot be read"),
        ("{}", r"no manifest of a package \(KeyError: 'format'\)"),
        ('{"format": 2}', "its format is 2; this release reads 1"),
        (
            '{"format": 1, "model": {}, "features": 3, "outputs": [], "version": ""}',
            "no manifest of a package",
        ),
    ],
)
def test_folder_that_is_no_package_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "package.json").write_text(text)
    with pytest.raises(PackageError, match=message):
        Manifest.read(tmp_path)


LONG_MS = 60_000.0


"""A wait that no test lasts."""


class Model:
    """A program that tells which requests came together, and fails on a request for user 13."""

    def __init__(self) -> None:
        self.batches: list[list[list[int]]] = []
        self.may_go = threading.Event()
        self.may_go.set()

    def predict(self, requests: Sequence[Samples]) -> list[list[int]]:
        assert self.may_go.wait(30)
        users = [request.ids[0].tolist() for request in requests]
        self.batches.append(users)
        if any(13 in own for own in users):
            raise ValueError("unlucky")
        return users


def request(*users: int) -> Samples:
    ids = np.array(users, dtype=np.int64)
    return Samples(np.ones((1, len(users)), dtype=np.int64), (ids,))


def run(test: Callable[[Model, Batcher], Coroutine[Any, Any, None]], **settings: Any) -> Model:
    """Run a test with a batcher, which must end."""
    model = Model()

    async def within() -> None:
        with ThreadPoolExecutor(1) as executor:
            batcher = Batcher(model.predict, executor, Settings("", **settings), Metrics())
            await test(model, batcher)
            await batcher.close()

    asyncio.run(asyncio.wait_for(within(), 60))
    return model


def test_requests_are_joined_up_to_the_size_in_order() -> None:
    async def test(model: Model, batcher: Batcher) -> None:
        waiting = [batcher.submit(request(*users)) for users in ((1, 2), (3,), (4, 5, 6), (7,))]
        assert await asyncio.gather(*waiting[:2]) == [[1, 2], [3]]
        await batcher.close()  # does not wait for more
        assert await asyncio.gather(*waiting[2:]) == [[4, 5, 6], [7]]

    model = run(test, max_batch=5, max_wait_ms=LONG_MS)
    assert model.batches == [[[1, 2], [3]], [[4, 5, 6], [7]]]


def test_request_on_which_the_program_fails_fails_alone() -> None:
    async def test(model: Model, batcher: Batcher) -> None:
        waiting = [batcher.submit(request(user)) for user in (1, 13, 2)]
        one, bad, two = await asyncio.gather(*waiting, return_exceptions=True)
        assert (one, two) == ([1], [2])
        assert isinstance(bad, PredictionError)
        assert str(bad) == "the program failed on this request: ValueError"
        assert await batcher.submit(request(3)) == [3]

    run(test, max_batch=3)


def test_request_whose_client_has_gone_disturbs_no_other() -> None:
    async def test(model: Model, batcher: Batcher) -> None:
        gone, other = batcher.submit(request(1)), batcher.submit(request(2))
        gone.cancel()
        assert await other == [2]

    run(test, max_batch=2)
