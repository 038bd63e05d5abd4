"""Increments of training that a package takes while it is served."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi", reason="shardwright-serving needs FastAPI")
pytest.importorskip("pyarrow", reason="shardwright-delta needs pyarrow")

import pyarrow as pa
import shardwright_delta as delta
import shardwright_serving as serving
from fastapi.testclient import TestClient
from shardwright_serving.packages.loading import map_rows
from shardwright_serving.packages.manifest import ROWS
from shardwright_serving.server.app import make_app
from shardwright_serving.server.settings import Settings

import shardwright as sw

FEATURES = sw.KeyedJaggedTensor.from_lists({"f": [[3, 1], []], "g": [[2], [5, 7]]})


class Model(torch.nn.Module):
    """Two tables, of several precisions when they are served."""

    def __init__(self, rows: int = 20) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [
            sw.EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=8, feature_names=[feature])
            for name, feature in (("t", "f"), ("u", "g"))
        ]
        self.bags = sw.EmbeddingBagCollection(tables)

    def forward(self, features: sw.KeyedJaggedTensor) -> torch.Tensor:
        return self.bags(features).values()


def trained(sharding_type: str = "table_wise", rows: int = 20) -> sw.DistributedModelParallel:
    sharders = [sw.EmbeddingBagCollectionSharder({"optimizer": "adagrad", "learning_rate": 0.5})]
    rule = sw.ParameterConstraints(sharding_types=[sharding_type], min_partition=4)
    planner = sw.EmbeddingShardingPlanner(sw.Topology(1, "cpu"), batch_size=2, constraints={"*": rule})
    module = Model(rows)
    plan = planner.plan(module, sharders)
    return sw.DistributedModelParallel(
        module, env=sw.ShardingEnv.local(device_type="cpu"), plan=plan, sharders=sharders
    )


def step(model: Any, *rows: int) -> None:
    features = sw.KeyedJaggedTensor.from_lists({"f": [[row] for row in rows], "g": [[row] for row in rows]})
    model(features).sin().sum().backward()


def packed(model: Any, path: Path) -> Path:
    return serving.export_for_inference(
        model, (FEATURES,), path, per_table={"u": "FP16"}, forms=["torchscript"], check=False
    )


def test_package_with_increments_has_the_rows_of_one_written_anew(tmp_path: Path) -> None:
    model = trained()
    package, changes = packed(model, tmp_path / "base"), delta.Changes(model)
    for rows in ((3, 5), (5, 7, 11)):
        step(model, *rows)
        serving.add_increment(package, changes.take())
    anew = packed(model, tmp_path / "anew")
    rows = map_rows(package / ROWS)
    assert torch.equal(rows, map_rows(anew / ROWS))
    assert (rows.numpy().tobytes() == (package / ROWS).read_bytes()) is False
    for one, other in zip(
        serving.load_package(package).predict(FEATURES).values(),
        serving.load_package(anew).predict(FEATURES).values(),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_server_takes_increments_between_batches_while_it_answers(tmp_path: Path) -> None:
    model = trained()
    package, changes = packed(model, tmp_path / "base"), delta.Changes(model)
    request = {"features": {"f": [[3]] * 4, "g": [[5]] * 4}}
    one = sw.KeyedJaggedTensor.from_lists({"f": [[3]], "g": [[5]]})
    answers: list[Any] = []
    with TestClient(make_app(Settings(package, program="torchscript", poll_seconds=0.05))) as client:

        def ask() -> Any:
            (values,) = client.post("/predict", json=request).json()["outputs"].values()
            return values

        over = threading.Event()

        def go_on_asking() -> None:
            while not over.is_set():
                answers.append(ask())

        answers.append(ask())
        asking = threading.Thread(target=go_on_asking)
        asking.start()
        try:
            wanted = [answers[0][0]]
            for number in range(3):
                step(model, 3, 5)
                serving.add_increment(package, changes.take())
                (told,) = serving.load_package(package).predict(one).values()
                wanted.append(told[0].tolist())
                until = time.monotonic() + 60
                while answers[-1][0] != wanted[-1] and time.monotonic() < until:
                    time.sleep(0.01)
                assert answers[-1][0] == wanted[-1], number
        finally:
            over.set()
            asking.join(60)
    seen = []
    for answer in answers:
        assert all(
            row == answer[0] for row in answer
        )  # the samples of a batch have the rows of one increment
        if answer[0] not in seen:
            seen.append(answer[0])
    assert seen == wanted


def test_increments_of_other_tables_and_of_cut_columns_are_refused(tmp_path: Path) -> None:
    model = trained("column_wise")
    package, changes = packed(model, tmp_path / "base"), delta.Changes(model)
    step(model, 3)
    with pytest.raises(sw.UnsupportedError, match=r"has columns \[0, 4\] of the 8 of table 'bags.t'"):
        serving.add_increment(package, changes.take())
    other = sw.EmbeddingBagCollection([sw.EmbeddingBagConfig(20, 8, "t", feature_names=["f"])])
    sharded = sw.DistributedModelParallel(other, env=sw.ShardingEnv.local(device_type="cpu"))
    changes = delta.Changes(sharded)
    sharded(sw.KeyedJaggedTensor.from_lists({"f": [[1]]})).values().sum().backward()
    with pytest.raises(sw.UnsupportedError, match=r"rows of table 't'; packages take .* bags\.t, bags\.u"):
        serving.add_increment(package, changes.take())
    assert not (package / "patches").exists() or not list((package / "patches").glob("*.npz"))


def test_increment_of_rows_that_the_table_has_not_leaves_the_table_after_it(tmp_path: Path) -> None:
    """They would be written over rows of another table in the package's file."""
    package = packed(trained(), tmp_path / "base")
    larger = trained(rows=30)
    changes = delta.Changes(larger)
    step(larger, 3, 25)
    with pytest.raises(sw.InvalidInputError, match=r"row 25 of table 'bags.t', which has 20 rows"):
        serving.add_increment(package, changes.take())
    assert not list((package / "patches").glob("*"))


def test_increment_of_numbers_that_are_no_weights_is_refused(tmp_path: Path) -> None:
    model = trained()
    package, changes = packed(model, tmp_path / "base"), delta.Changes(model)
    step(model, 3)
    batches = [
        batch.set_column(1, "weight", batch.column("weight").cast(pa.list_(pa.float64(), 8)))
        for batch in changes.take()
    ]
    with pytest.raises(sw.InvalidInputError, match=r"weights of table 'bags.t' as double"):
        serving.add_increment(package, batches)
