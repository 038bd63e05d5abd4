"""Public names of pipelines."""

from __future__ import annotations

from shardwright_plugins.pipeline.stages import (
    Backward,
    CopyToDevice,
    Evaluate,
    ExchangeHeaders,
    ExchangeIds,
    Forward,
    OptimizerStep,
    PipelineStage,
    PipelineStep,
    Prefetch,
    StageAround,
    ZeroGrad,
)
from shardwright_plugins.pipeline.train_pipeline import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipeline,
    TrainPipelineBase,
    TrainPipelineSparseDist,
    lockstep_batches,
)

__all__ = [
    "Backward",
    "CopyToDevice",
    "EvalPipelineSparseDist",
    "Evaluate",
    "ExchangeHeaders",
    "ExchangeIds",
    "Forward",
    "OptimizerStep",
    "PipelineStage",
    "PipelineStep",
    "Prefetch",
    "PrefetchTrainPipelineSparseDist",
    "StageAround",
    "TrainPipeline",
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
    "ZeroGrad",
    "lockstep_batches",
]
