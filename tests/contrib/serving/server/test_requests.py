"""Requests are made arrays of, or refused in a sentence that names the feature."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="shardwright-serving needs FastAPI")

from shardwright_serving.packages.manifest import Manifest, PackageError
from shardwright_serving.server.requests import RequestReader, UnfitRequestError
from shardwright_serving.server.samples import Samples, joined
from tests.contrib.serving.server import small_packages as packages


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
