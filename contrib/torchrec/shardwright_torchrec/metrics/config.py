"""Configurations of metrics: which metrics, of which tasks, over how many samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

__all__ = [
    "BatchSizeStage",
    "DefaultMetricsConfig",
    "DefaultTaskInfo",
    "EmptyMetricsConfig",
    "MetricsConfig",
    "RecComputeMode",
    "RecMetricDef",
    "RecMetricEnum",
    "RecMetricEnumBase",
    "RecTaskInfo",
    "SessionMetricDef",
    "StateMetricEnum",
    "ThroughputDef",
]

WINDOW_SAMPLES = 10_000_000
"""Samples of a window by default, of all ranks; TorchRec's number."""


class RecMetricEnumBase(StrEnum):
    """Base of names of metrics; a script may add its own."""


class RecMetricEnum(RecMetricEnumBase):
    """Names of TorchRec's metrics; `metric_module.REC_METRICS_MAPPING` has those that can be computed here."""

    NE = "ne"
    NE_POSITIVE = "ne_positive"
    RECALIBRATED_NE = "recalibrated_ne"
    RECALIBRATED_CALIBRATION = "recalibrated_calibration"
    SEGMENTED_NE = "segmented_ne"
    LOG_LOSS = "log_loss"
    CTR = "ctr"
    AUC = "auc"
    AUPRC = "auprc"
    RAUC = "rauc"
    CALIBRATION = "calibration"
    MSE = "mse"
    MAE = "mae"
    MULTICLASS_RECALL = "multiclass_recall"
    RECALL_SESSION_LEVEL = "recall_session_level"
    PRECISION_SESSION_LEVEL = "precision_session_level"
    WEIGHTED_AVG = "weighted_avg"
    TOWER_QPS = "tower_qps"
    ACCURACY = "accuracy"
    NDCG = "ndcg"
    XAUC = "xauc"
    SCALAR = "scalar"
    PRECISION = "precision"
    RECALL = "recall"
    SERVING_NE = "serving_ne"
    SERVING_CALIBRATION = "serving_calibration"
    OUTPUT = "output"
    TENSOR_WEIGHTED_AVG = "tensor_weighted_avg"
    CALI_FREE_NE = "cali_free_ne"
    UNWEIGHTED_NE = "unweighted_ne"
    HINDSIGHT_TARGET_PR = "hindsight_target_pr"
    NMSE = "nmse"
    AVERAGE = "average"
    MULTI_LABEL_PRECISION = "multi_label_precision"
    NUM_POSITIVE_SAMPLES = "num_positive_samples"
    SUM_WEIGHTS = "sum_weights"
    NUM_MISSING_LABELS = "num_missing_labels"
    WEIGHTED_SUM_PREDICTIONS = "weighted_sum_predictions"


class StateMetricEnum(StrEnum):
    """Names of sources of numbers that are no metrics of predictions."""

    OPTIMIZERS = "optimizers"
    MODEL_CONFIGURATOR = "model_configurator"


class RecComputeMode(Enum):
    """Ways to hold several tasks: each in tensors of its own, or together; the values are the same."""

    FUSED_TASKS_COMPUTATION = 1
    UNFUSED_TASKS_COMPUTATION = 2
    FUSED_TASKS_AND_STATES_COMPUTATION = 3


@dataclass(unsafe_hash=True, eq=True)
class SessionMetricDef:
    """Definition of a session: the name of its tensor, and how many of its first items count."""

    session_var_name: str
    top_threshold: int | None = None
    run_ranking_of_labels: bool = False


@dataclass(unsafe_hash=True, eq=True)
class RecTaskInfo:
    """A task: names of its label, prediction and weight in the model's output.

    Without a prediction's or a weight's name, predictions are missing or weights are 1.
    """

    name: str = "DefaultTask"
    label_name: str = "label"
    prediction_name: str = "prediction"
    weight_name: str = "weight"
    session_metric_def: SessionMetricDef | None = None
    is_negative_task: bool = False
    tensor_name: str | None = None
    weighted: bool = True


@dataclass
class RecMetricDef:
    """Definition of a metric: its tasks, or their places in the configuration, and its window, samples of all ranks."""

    rec_tasks: list[RecTaskInfo] = field(default_factory=list)
    rec_task_indices: list[int] = field(default_factory=list)
    window_size: int = WINDOW_SAMPLES
    arguments: dict[str, Any] | None = None


@dataclass
class ThroughputDef:
    """Definition of the throughput: seconds of its window, and steps before it counts."""

    window_size: int = 100
    warmup_steps: int = 100


@dataclass
class BatchSizeStage:
    """A batch size, and the last step that has it; `None`: until the end."""

    batch_size: int = 0
    max_iters: int | None = 0


@dataclass
class MetricsConfig:
    """Configuration of all metrics of a training job; TorchRec's fields."""

    rec_tasks: list[RecTaskInfo] = field(default_factory=list)
    rec_metrics: dict[RecMetricEnumBase, RecMetricDef] = field(default_factory=dict)
    throughput_metric: ThroughputDef | None = None
    rec_compute_mode: RecComputeMode = RecComputeMode.UNFUSED_TASKS_COMPUTATION
    fused_update_limit: int = 0
    state_metrics: list[StateMetricEnum] = field(default_factory=list)
    compute_interval_steps: int = 100
    min_compute_interval: float = 0.0
    max_compute_interval: float = float("inf")
    compute_on_all_ranks: bool = False
    should_validate_update: bool = False
    enable_pt2_compile: bool = False
    should_clone_update_inputs: bool = False
    use_cpu_offloaded_rec_metric_module: bool | None = None


DefaultTaskInfo = RecTaskInfo()
DefaultMetricsConfig = MetricsConfig(
    rec_tasks=[DefaultTaskInfo],
    rec_metrics={RecMetricEnum.NE: RecMetricDef(rec_tasks=[DefaultTaskInfo])},
    throughput_metric=ThroughputDef(),
)
EmptyMetricsConfig = MetricsConfig()
