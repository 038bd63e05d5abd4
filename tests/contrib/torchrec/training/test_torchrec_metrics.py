"""Metrics under TorchRec's names, against scikit-learn and TorchRec's own values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from shardwright_torchrec.metrics.computations import (
    AccuracyMetricComputation,
    AUCMetricComputation,
    GAUCMetricComputation,
    MAEMetricComputation,
    MSEMetricComputation,
    NEMetricComputation,
    RecMetricComputation,
)
from sklearn.metrics import roc_auc_score
from tests.contrib.torchrec.training import workers

pytestmark = pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")  # before the first sample
BATCHES = workers.samples(0, 4)
# Values of TorchRec 1.8.0 for BATCHES and a window of 24 samples: of the lifetime, and of the window.
THEIRS: dict[type[RecMetricComputation], dict[str, tuple[float, float]]] = {
    NEMetricComputation: {"ne": (1.070743, 1.22287)},
    MSEMetricComputation: {"mse": (0.263266, 0.303771), "rmse": (0.513094, 0.551154)},
    MAEMetricComputation: {"mae": (0.445181, 0.481274)},
}


def column(name: str, batches: list[dict[str, torch.Tensor]] = BATCHES) -> np.ndarray:
    return torch.cat([batch[name] for batch in batches]).double().numpy()


def computed(kind: type[RecMetricComputation]) -> dict[str, float]:
    module = kind(0, workers.BATCH, 1, workers.WINDOW)
    for batch in BATCHES:
        workers.count(module, batch)
    return workers.values([module])


@pytest.mark.parametrize("kind", THEIRS, ids=lambda kind: kind.__name__)
def test_metric_is_torchrecs(kind: type[RecMetricComputation]) -> None:
    expected = {
        f"{prefix}_{key}": pytest.approx(both[place], rel=2e-6, abs=2e-6)
        for key, both in THEIRS[kind].items()
        for place, prefix in enumerate(("lifetime", "window"))
    }
    assert computed(kind) == expected


def test_metrics_of_scikit_learn_are_the_same() -> None:
    p, y, w = (column(name, BATCHES[1:]) for name in "plw")
    assert computed(AUCMetricComputation) == {
        "window_auc": pytest.approx(roc_auc_score(y, p, sample_weight=w))
    }
    right = np.average((p >= 0.5) == y, weights=w)
    assert computed(AccuracyMetricComputation)["window_accuracy"] == pytest.approx(right)


def test_tasks_have_the_values_of_torchrec() -> None:
    generator = torch.Generator().manual_seed(0)
    entropy, sessions, area = (
        kind(0, 8, 2, 20) for kind in (NEMetricComputation, GAUCMetricComputation, AUCMetricComputation)
    )
    for _ in range(3):
        predictions, labels, weights = (
            torch.stack([torch.rand(8, generator=generator) for _ in range(2)]) for _ in range(3)
        )
        batch = {"predictions": predictions, "labels": (labels > 0.5).float(), "weights": weights}
        entropy.update(**batch)
        area.update(**batch)
        sessions.update(**batch, num_candidates=torch.tensor([3, 5]))
    found = {
        report.metric_prefix + report.name: report.value.tolist()
        for module in (entropy, sessions, area)
        for report in module.compute()
    }
    assert found["window_ne"][0] == pytest.approx(1.255481, rel=2e-6)
    assert found["lifetime_ne"][1] == pytest.approx(1.422914, rel=2e-6)
    assert found["window_auc"] == pytest.approx([0.621265, 0.41026], rel=2e-6)
    assert found["window_gauc"][0] == pytest.approx(0.533506, rel=2e-6)
    assert found["lifetime_gauc"][1] == pytest.approx(0.459147, rel=2e-6)
    assert (found["lifetime_gauc_num_samples"][0], found["window_gauc_num_samples"][1]) == (6, 3)


@pytest.mark.parametrize("kind", [NEMetricComputation, AUCMetricComputation])
def test_value_of_one_task_is_read_by_its_number(kind: type[RecMetricComputation]) -> None:
    module = kind(0, workers.BATCH, 1, workers.WINDOW)
    workers.count(module, BATCHES[0])
    assert [report.value.shape for report in module.compute()] == [(1,)] * len(module.compute())


def test_areas_without_samples_or_of_one_label_are_those_of_no_knowledge() -> None:
    area = AUCMetricComputation(0, 8, 1, 24)
    assert workers.values([area]) == {"window_auc": 0.5}
    workers.count(area, {**BATCHES[0], "l": torch.ones(8)})
    assert workers.values([area]) == {"window_auc": 0.5}


@pytest.mark.parametrize("kind", [NEMetricComputation, AUCMetricComputation])
def test_metric_begins_anew_and_reports_where_it_is_asked_for(kind: type[RecMetricComputation]) -> None:
    module = kind(0, workers.BATCH, 1, workers.WINDOW)
    for batch in BATCHES:
        workers.count(module, batch)
    module.reset()
    workers.count(module, BATCHES[0])
    again = kind(1, workers.BATCH, 1, workers.WINDOW, compute_on_all_ranks=True)
    workers.count(again, BATCHES[0])
    assert workers.values([module]) == workers.values([again])
    assert kind(1, workers.BATCH, 1, workers.WINDOW).compute() == []
