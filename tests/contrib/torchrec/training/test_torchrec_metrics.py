"""Metrics under TorchRec's names, against scikit-learn, plain formulas and TorchRec's own values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from shardwright_torchrec.metrics import metric_module, throughput
from shardwright_torchrec.metrics.config import (
    BatchSizeStage,
    DefaultMetricsConfig,
    MetricsConfig,
    RecComputeMode,
    RecMetricDef,
    RecMetricEnum,
    RecTaskInfo,
    StateMetricEnum,
    ThroughputDef,
)
from shardwright_torchrec.metrics.metric_module import (
    REC_METRICS_MAPPING,
    RecMetricModule,
    StateMetric,
    generate_metric_module,
)
from shardwright_torchrec.metrics.ranked import AUCMetric
from shardwright_torchrec.metrics.rec_metric import (
    MetricComputationReport,
    RecMetric,
    RecMetricComputation,
)
from shardwright_torchrec.metrics.sums import GAUCMetric, NEMetric
from sklearn.metrics import (
    average_precision_score,
    mean_absolute_error,
    precision_score,
    recall_score,
    roc_auc_score,
)
from tests.contrib.torchrec.training import workers

import shardwright as sw

BATCHES = workers.samples(0, 4)
# Values of TorchRec 1.8.0 for BATCHES and a window of 24 samples: of the lifetime, and of the window.
THEIRS: dict[str, tuple[dict[str, Any], dict[str, tuple[float, float]]]] = {
    "ne": ({"include_logloss": True}, {"ne": (1.070743, 1.22287), "logloss": (1.070035, 1.217319)}),
    "ne_positive": ({}, {"ne_positive": (0.378668, 0.495438)}),
    "recalibrated_ne": ({"recalibration_coefficient": 0.5}, {"ne": (1.038218, 1.246539)}),
    "recalibrated_calibration": (
        {"recalibration_coefficient": 0.5},
        {"calibration": (0.935158, 0.840997)},
    ),
    "ctr": ({}, {"ctr": (0.484861, 0.539642)}),
    "calibration": ({}, {"calibration": (1.198666, 1.071585)}),
    "mse": (
        {"include_r_squared": True},
        {"mse": (0.263266, 0.303771), "rmse": (0.513094, 0.551154), "r_squared": (-0.054029, -0.222769)},
    ),
    "mae": ({}, {"mae": (0.445181, 0.481274)}),
    "accuracy": ({"threshold": 0.7}, {"accuracy": (0.642194, 0.498842)}),
    "precision": ({}, {"precision": (0.574639, 0.550936)}),
    "recall": ({"threshold": 0.3}, {"recall": (0.866131, 0.831532)}),
    "unweighted_ne": ({}, {"unweighted_ne": (1.115625, 1.230195)}),
    "nmse": ({}, {"nmse": (0.511058, 0.659857), "nrmse": (0.714883, 0.812316)}),
    "average": (
        {},
        {"label_average": (0.484861, 0.539642), "prediction_average": (0.581187, 0.578273)},
    ),
    "num_positive_samples": ({}, {"num_positive_samples": (8.151648, 6.477481)}),
    "sum_weights": ({}, {"sum_weights": (16.812327, 12.003291)}),
    "weighted_sum_predictions": ({}, {"weighted_sum_predictions": (9.771101, 6.941174)}),
}


def column(name: str, batches: list[dict[str, torch.Tensor]] = BATCHES) -> np.ndarray:
    return torch.cat([batch[name] for batch in batches]).double().numpy()


def computed(name: str, **arguments: Any) -> dict[str, float]:
    """Values of a metric of the batches, without the task's name."""
    config = MetricsConfig(
        rec_tasks=[workers.TASK],
        rec_metrics={
            RecMetricEnum(name): RecMetricDef([workers.TASK], window_size=workers.WINDOW, arguments=arguments)
        },
    )
    module = generate_metric_module(RecMetricModule, config, workers.BATCH, 1, 0, {}, torch.device("cpu"))
    for batch in BATCHES:
        module.update(batch)
    return {key.removeprefix(f"{name}-T|"): float(value) for key, value in module.compute().items()}


@pytest.mark.parametrize("name", THEIRS)
def test_metric_is_torchrecs(name: str) -> None:
    arguments, values = THEIRS[name]
    expected = {
        f"{prefix}_{key}": pytest.approx(both[place], rel=2e-6, abs=2e-6)
        for key, both in values.items()
        for place, prefix in enumerate(("lifetime", "window"))
    }
    assert computed(name, **arguments) == expected


def test_every_metric_here_is_compared() -> None:
    assert {str(name) for name in REC_METRICS_MAPPING} == {*THEIRS, "auc", "auprc", "weighted_avg"}


def test_metrics_of_scikit_learn_are_the_same() -> None:
    p, y, w = (column(name, BATCHES[1:]) for name in "plw")
    assert computed("auc")["window_auc"] == pytest.approx(roc_auc_score(y, p, sample_weight=w))
    assert computed("auprc")["window_auprc"] == pytest.approx(average_precision_score(y, p, sample_weight=w))
    assert computed("mae")["window_mae"] == pytest.approx(mean_absolute_error(y, p, sample_weight=w))
    for name, score in (("precision", precision_score), ("recall", recall_score)):
        assert computed(name)[f"window_{name}"] == pytest.approx(score(y, p > 0.5, sample_weight=w))
    assert computed("weighted_avg")["window_weighted_avg"] == pytest.approx(np.average(p, weights=w))


TASKS = [RecTaskInfo(name="T"), RecTaskInfo(name="U")]


def two_tasks() -> Iterator[dict[str, dict[str, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        batch: dict[str, dict[str, torch.Tensor]] = {}
        for kind in ("predictions", "labels", "weights"):
            values = {task.name: torch.rand(8, generator=generator) for task in TASKS}
            batch[kind] = {
                name: (value > 0.5).float() if kind == "labels" else value for name, value in values.items()
            }
        yield batch


@pytest.mark.parametrize("mode", list(RecComputeMode))
def test_tasks_together_or_apart_have_the_values_of_torchrec(mode: RecComputeMode) -> None:
    entropy = NEMetric(1, 0, 8, TASKS, window_size=20, compute_mode=mode)
    sessions = GAUCMetric(1, 0, 8, TASKS, window_size=20, compute_mode=mode)
    area = AUCMetric(1, 0, 8, TASKS, window_size=20, compute_mode=mode)
    for batch in two_tasks():
        entropy.update(**batch)
        area.update(**batch)
        sessions.update(**batch, num_candidates=torch.tensor([3, 5]))
    found = {**entropy.compute(), **area.compute(), **sessions.compute()}
    expected = {"ne-T|window_ne": 1.255481, "ne-U|lifetime_ne": 1.422914, "auc-T|window_auc": 0.621265}
    expected |= {
        "auc-U|window_auc": 0.41026,
        "gauc-T|window_gauc": 0.533506,
        "gauc-U|lifetime_gauc": 0.459147,
    }
    expected |= {"gauc-T|lifetime_gauc_num_samples": 6, "gauc-U|window_gauc_num_samples": 3}
    assert {name: float(found[name]) for name in expected} == pytest.approx(expected, rel=2e-6)


def test_groups_have_their_own_areas() -> None:
    metric = AUCMetric(1, 0, 8, [workers.TASK], window_size=100, grouped_auc=True)
    keys, p, y, w = torch.arange(16) % 2, *(torch.cat([one[name] for one in BATCHES[:2]]) for name in "plw")
    metric.update(
        predictions={"T": p}, labels={"T": y}, weights={"T": w}, required_inputs={"grouping_keys": keys}
    )
    expected = np.mean(
        [roc_auc_score(y[keys == key], p[keys == key], sample_weight=w[keys == key]) for key in (0, 1)]
    )
    found = metric.compute()
    assert float(found["auc-T|window_grouped_auc"]) == pytest.approx(expected)
    assert float(found["auc-T|window_auc"]) == pytest.approx(roc_auc_score(y, p, sample_weight=w))
    assert {value.dtype for value in found.values()} == {torch.float32}  # as TorchRec's
    assert len(found) == 2
    with pytest.raises(sw.InvalidInputError, match="grouping_keys"):
        metric.update(predictions={"T": p}, labels={"T": y}, weights={"T": w})


def test_areas_of_one_label_are_those_of_no_knowledge() -> None:
    module = workers.metrics()
    assert float(module.local_compute()["auc-T|local_window_auc"]) == 0.5  # no sample yet
    module.update({**BATCHES[0], "l": torch.ones(8)})
    assert float(module.compute()["auc-T|window_auc"]) == 0.5


def test_lifetime_sums_are_saved_under_torchrecs_names() -> None:
    module = generate_metric_module(RecMetricModule, DefaultMetricsConfig, 8, 1, 0, {}, torch.device("cpu"))
    names = ("label", "prediction", "weight")
    for batch in BATCHES:
        module.update(dict(zip(names, (batch[name] for name in "lpw"), strict=True)))
    saved = module.state_dict()
    states = ("cross_entropy_sum", "weighted_num_samples", "pos_labels", "neg_labels")
    buffers = ("total_examples", "warmup_examples", "time_lapse_after_warmup")
    assert list(saved) == [
        *(f"rec_metrics.rec_metrics.0._metrics_computations.0.{name}" for name in states),
        *(f"throughput_metric.{name}" for name in buffers),
    ]
    again = generate_metric_module(RecMetricModule, DefaultMetricsConfig, 8, 1, 0, {}, torch.device("cpu"))
    again.load_state_dict(saved)
    again.update(dict(zip(names, (BATCHES[0][name] for name in "lpw"), strict=True)))
    module.update(dict(zip(names, (BATCHES[0][name] for name in "lpw"), strict=True)))
    key = "ne-DefaultTask|lifetime_ne"
    assert torch.equal(again.compute()[key], module.compute()[key])
    module.reset()
    own = module.local_compute()
    assert list(own) == [f"ne-DefaultTask|local_{window}_ne" for window in ("lifetime", "window")]
    assert [value.tolist() for value in own.values()] == [[0], [0]]  # of one task: one number, not none


def test_throughput_counts_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 6.0, 10.0])
    monkeypatch.setattr(throughput.time, "monotonic", lambda: next(clock))
    metric = throughput.ThroughputMetric(
        batch_size=4,
        world_size=2,
        window_seconds=8,
        warmup_steps=2,
        batch_size_stages=[BatchSizeStage(4, 3), BatchSizeStage(8, None)],
    )
    for _ in range(5):
        metric.update()
    found = {name.partition("|")[2]: float(value) for name, value in metric.compute().items()}
    assert found == {
        "total_examples": 3 * 8 + 2 * 16,
        "attempt_examples": 3 * 8 + 2 * 16,
        "batch_size": 8,
        "lifetime_throughput": (8 + 16 + 16) / 9,
        "attempt_throughput": (8 + 16 + 16) / 9,
        "window_throughput": (16 + 16) / 7,
    }
    with pytest.raises(sw.InvalidInputError, match="got 0 and 100"):
        throughput.ThroughputMetric(batch_size=1, world_size=1, window_seconds=0)


def test_other_numbers_and_intervals() -> None:
    class Rates(StateMetric):
        def get_metrics(self) -> dict[str, torch.Tensor | float]:
            return {"learning_rate": 0.5}

    config = MetricsConfig(
        state_metrics=[StateMetricEnum.OPTIMIZERS],
        compute_interval_steps=2,
        throughput_metric=ThroughputDef(),
    )
    sources = {StateMetricEnum.OPTIMIZERS: Rates()}
    module = generate_metric_module(RecMetricModule, config, 8, 1, 0, sources, torch.device("cpu"))
    due = []
    for _ in range(3):
        module.update({})
        due.append(module.should_compute())
    assert due == [False, True, False]
    values, told = module.compute(), []
    values.subscribe(told.append)
    assert values.resolve() == told[0] == values
    assert values.is_resolved()
    assert values["optimizers-optimizers|learning_rate"] == 0.5
    with pytest.raises(sw.UnsupportedError, match="compute_interval_steps"):
        RecMetricModule(8, 1, min_compute_interval=1.0)


def test_wrong_samples_and_names_say_what_is_wrong() -> None:
    module = workers.metrics()
    with pytest.raises(sw.InvalidInputError, match=r"has no 'l', only \['p', 'w'\]"):
        module.update({name: BATCHES[0][name] for name in "pw"})
    with pytest.raises(sw.InvalidInputError, match=r"'T' has tensors of different sizes: .*'p': 8"):
        module.update({**BATCHES[0], "l": torch.ones(3)})
    with pytest.raises(
        sw.InvalidInputError, match=r"5 samples of 1 ranks are 5 a rank, whose batches have 8"
    ):
        workers.metrics(window=5)
    config = MetricsConfig(rec_metrics={RecMetricEnum.NDCG: RecMetricDef([workers.TASK])})
    with pytest.raises(sw.UnsupportedError, match=r"no metric 'ndcg' here. Known: accuracy, auc"):
        generate_metric_module(RecMetricModule, config, 8, 1, 0, {}, torch.device("cpu"))


def test_a_scripts_own_metric_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Largest(RecMetricComputation):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            zeros = torch.zeros(self._n_tasks)
            self._add_state("total", zeros, add_window_state=True, dist_reduce_fx="sum", persistent=True)

        def update(self, *, predictions: Any, labels: Any, weights: Any, **kwargs: Any) -> None:
            self.total += predictions.sum(-1)
            self._aggregate_window_state("total", predictions.sum(-1), predictions.shape[-1])

        def _compute(self) -> list[MetricComputationReport]:
            return [MetricComputationReport("total", "window_", self.get_window_state("total"))]

    class LargestMetric(RecMetric):
        _namespace, _computation_class = "total", Largest

    monkeypatch.setitem(metric_module.REC_METRICS_MAPPING, RecMetricEnum.SCALAR, LargestMetric)
    config = MetricsConfig(
        rec_tasks=[workers.TASK],
        rec_metrics={RecMetricEnum.SCALAR: RecMetricDef(rec_task_indices=[0], window_size=16)},
    )
    module = generate_metric_module(RecMetricModule, config, 8, 1, 0, {}, torch.device("cpu"))
    for batch in BATCHES:
        module.update(batch)
    assert float(module.compute()["total-T|window_total"]) == pytest.approx(column("p", BATCHES[2:]).sum())


def test_memory_of_a_metric_is_that_of_its_tensors() -> None:
    given = {"predictions": torch.rand(1, 5), "labels": torch.ones(1, 5), "weights": torch.ones(1, 5)}
    area, entropy = (
        kind(world_size=1, my_rank=0, batch_size=5, tasks=TASKS[:1], window_size=10)
        for kind in (AUCMetric, NEMetric)
    )
    states = entropy.get_memory_usage()
    assert sum(area.get_memory_usage().values()) == 0
    for _ in range(4):
        area.update(**given)
        entropy.update(**given)
    # Predictions, labels and weights of the 10 samples of the window are float64.
    assert list(area.get_memory_usage().values()) == [10 * 3 * 8]
    # A state has a sum over the window beside that over the lifetime, and keeps those of the window's 2 batches.
    kept = entropy.get_memory_usage()
    assert len(kept) == 2 * len(states)
    assert all(size == tensor.nbytes for tensor, size in kept.items())
