"""Packages of `export_for_inference`, served in each of their forms."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contrib.serving.packages.models import BATCHES, EXAMPLE, Model, batch

pytest.importorskip("fastapi", reason="shardwright-serving needs FastAPI")

import shardwright_serving as serving
from fastapi.testclient import TestClient
from shardwright_serving.server.app import make_app
from shardwright_serving.server.settings import Settings

import shardwright as sw


def request_of(dense: torch.Tensor, features: sw.KeyedJaggedTensor) -> dict[str, Any]:
    """Make the request that asks for a batch's predictions."""
    bags, weights = {}, {}
    for name, jagged in features.to_dict().items():
        ends = [0, *itertools.accumulate(jagged.lengths().tolist())]
        ids, own = jagged.values().tolist(), jagged.weights_or_none()
        bags[name] = [ids[start:end] for start, end in itertools.pairwise(ends)]
        if own is not None:
            weights[name] = [own.tolist()[start:end] for start, end in itertools.pairwise(ends)]
    return {"features": bags, "dense": dense.tolist(), **({"weights": weights} if weights else {})}


@pytest.mark.parametrize(
    "form",
    [
        "torchscript",
        pytest.param("exported", marks=pytest.mark.slow),
        pytest.param("pt2", marks=pytest.mark.slow),
    ],
)
def test_package_is_served_as_the_library_predicts(tmp_path: Path, form: str) -> None:
    package = serving.export_for_inference(
        Model(), batch(EXAMPLE), tmp_path / "package", forms=[form], check=False
    )
    loaded = serving.load_package(package, form)
    with TestClient(make_app(Settings(package, program=form))) as client:
        for seed, lengths in enumerate(BATCHES):
            dense, features = batch(lengths, seed)
            response = client.post("/predict", json=request_of(dense, features))
            if not len(dense):
                assert response.json()["detail"][0]["msg"] == "the request has no samples"
                continue
            answer = response.json()
            assert answer["version"] == loaded.manifest.version
            for name, wanted in loaded.predict(features, dense).items():
                torch.testing.assert_close(torch.tensor(answer["outputs"][name]), wanted)
