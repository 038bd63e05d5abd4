"""Names that TorchRec promises to keep: those of which its schema tests hold the signatures.

Signatures are not listed: they are read from the TorchRec that is installed.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["CONTRACT"]

_PROPOSER = ("__init__", "load", "propose", "feedback")
_RESERVATION = ("__init__", "reserve")

CONTRACT: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "torchrec.distributed.model_parallel": {"DistributedModelParallel": ("__init__", "forward")},
    "torchrec.distributed.planner.enumerators": {
        "EmbeddingEnumerator": ("__init__", "enumerate", "populate_estimates")
    },
    "torchrec.distributed.planner.partitioners": {"GreedyPerfPartitioner": ("__init__", "partition")},
    "torchrec.distributed.planner.planners": {
        "EmbeddingShardingPlanner": ("__init__", "collective_plan", "plan")
    },
    "torchrec.distributed.planner.proposers": {"GreedyProposer": _PROPOSER},
    "torchrec.distributed.planner.shard_estimators": {
        "EmbeddingPerfEstimator": ("__init__", "estimate"),
        "EmbeddingStorageEstimator": ("__init__", "estimate"),
    },
    "torchrec.distributed.planner.storage_reservations": {"HeuristicalStorageReservation": _RESERVATION},
    "torchrec.distributed.quant_embedding": {"QuantEmbeddingCollectionSharder": ("__init__",)},
    "torchrec.distributed.quant_embeddingbag": {"QuantEmbeddingBagCollectionSharder": ("__init__",)},
    "torchrec.inference.modules": {
        "DEFAULT_FUSED_PARAMS": (),
        "DEFAULT_QUANTIZATION_DTYPE": (),
        "DEFAULT_QUANT_MAPPING": (),
        "DEFAULT_SHARDERS": (),
        "quantize_inference_model": (),
        "shard_quant_model": (),
        "trim_torch_package_prefix_from_typename": (),
    },
    "torchrec.modules.embedding_configs": {
        "DataType": (),
        "EmbeddingBagConfig": ("__init__",),
        "EmbeddingConfig": ("__init__",),
        "PoolingType": (),
    },
    "torchrec.modules.embedding_modules": {
        "EmbeddingBagCollection": ("__init__", "embedding_bag_configs", "forward", "is_weighted"),
        "EmbeddingCollection": (
            *("__init__", "embedding_configs", "embedding_dim", "embedding_names_by_table", "forward"),
            "need_indices",
        ),
    },
    "torchrec.optim.keyed": {
        "CombinedOptimizer": (
            *("__init__", "optimizers", "post_load_state_dict", "prepend_opt_key"),
            *("save_param_groups", "step", "zero_grad"),
        ),
        "KeyedOptimizer": (
            *("__init__", "add_param_group", "init_state", "load_state_dict", "save_param_groups"),
        ),
    },
    "torchrec.sparse.jagged_tensor": {
        "JaggedTensor": (
            *(
                "__init__",
                "device",
                "empty",
                "from_dense",
                "from_dense_lengths",
                "lengths",
                "lengths_or_none",
            ),
            *("offsets", "offsets_or_none", "record_stream", "to", "to_dense", "to_dense_weights"),
            *("to_padded_dense", "to_padded_dense_weights", "values", "weights", "weights_or_none"),
        ),
        "KeyedJaggedTensor": (
            *("__getitem__", "__init__", "_key_indices", "concat", "device", "dist_init", "dist_labels"),
            *("dist_splits", "dist_tensors", "empty", "empty_like", "flatten_lengths", "from_jt_dict"),
            *("from_lengths_sync", "from_offsets_sync", "index_per_key", "inverse_indices"),
            *("inverse_indices_or_none", "keys", "length_per_key", "length_per_key_or_none", "lengths"),
            *("lengths_offset_per_key", "lengths_or_none", "offset_per_key", "offset_per_key_or_none"),
            *("offsets", "offsets_or_none", "permute", "pin_memory", "record_stream", "split", "stride"),
            *("stride_per_key", "stride_per_key_per_rank", "sync", "to", "to_dict", "unsync", "values"),
            *("variable_stride_per_key", "weights", "weights_or_none"),
        ),
        "KeyedTensor": (
            *("__getitem__", "__init__", "_key_indices", "device", "from_tensor_list", "key_dim", "keys"),
            *("length_per_key", "offset_per_key", "record_stream", "regroup", "regroup_as_dict", "to"),
            *("to_dict", "values"),
        ),
    },
}
"""TorchRec's module path -> classes, functions and constants -> methods of a class."""
