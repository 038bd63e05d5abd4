"""Names that public scripts import, and methods of the contract, that are not here, with the reason for each."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["LEFT_OUT", "METHODS_LEFT_OUT"]

LEFT_OUT: Mapping[str, str] = {
    "torchrec.distributed.embedding_types.ShardedEmbeddingTable": (
        "a shard's description inside TorchRec's kernels; plan and `state_dict()` tell a rank's shards"
    ),
    "torchrec.distributed.embeddingbag.EmbeddingBagSharder": (
        "a single `nn.EmbeddingBag` is not sharded: make it a table of an `EmbeddingBagCollection`"
    ),
    "torchrec.distributed.train_pipeline.StagedTrainPipeline": (
        "loops of a script's own stages on CUDA streams; `TrainPipelineSparseDist` has its own"
    ),
    "torchrec.distributed.train_pipeline.utils.TrainPipelineContext": "state inside TorchRec's loops",
    "torchrec.distributed.types.QuantizedCommCodecs": (
        "codecs are plugins, which `get_qcomm_codecs_registry` chooses by name"
    ),
    "torchrec.distributed.utils.sharded_model_copy": (
        "a sharded model lives on several ranks and is not copied: save its state, and load it into another"
    ),
    "torchrec.modules.regroup.PermuteMultiEmbedding": "FBGEMM's operator behind `KTRegroupAsDict`, which is here",
}
"""Module path and name -> reason."""

METHODS_LEFT_OUT: Mapping[str, str] = dict.fromkeys(
    (f"KeyedJaggedTensor.{name}" for name in ("dist_init", "dist_labels", "dist_splits", "dist_tensors")),
    "steps of TorchRec's exchange between ranks; sharded modules have their own",
)
"""Class and method -> reason."""
