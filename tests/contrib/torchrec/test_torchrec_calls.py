"""Configurations, models and quantizing, called as TorchRec's scripts call them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import shardwright_serving as serving
import torch
from shardwright_torchrec.distributed.fbgemm_qcomm_codec import get_qcomm_codecs_registry
from shardwright_torchrec.modules.configs import EmbeddingBagConfig, EmbeddingConfig
from shardwright_torchrec.parallel.model_parallel import (
    DistributedModelParallel,
    get_unwrapped_module,
)
from shardwright_torchrec.parallel.sharders import EmbeddingBagCollectionSharder
from shardwright_torchrec.quant.inference import (
    DEFAULT_QUANT_MAPPING,
    DEFAULT_SHARDERS,
    quantize_inference_model,
    shard_quant_model,
    trim_torch_package_prefix_from_typename,
)
from tests.errors import raises

import shardwright as sw


@pytest.mark.parametrize("kind", [EmbeddingConfig, EmbeddingBagConfig])
def test_configuration_takes_torchrecs_fields_and_is_replaced(kind: Any) -> None:
    table = kind(10, 8, "t", feature_names=["f"], need_pos=False, use_virtual_table=False)
    wider = dataclasses.replace(table, embedding_dim=16)
    assert type(wider) is kind
    assert (wider.embedding_dim, wider.name, wider.feature_names) == (16, "t", ["f"])
    with pytest.raises(sw.UnsupportedError, match=r"table 't': use_virtual_table=True .*hash-embedding"):
        kind(10, 8, "t", use_virtual_table=True)


def model() -> torch.nn.Module:
    bags = sw.EmbeddingBagCollection([EmbeddingBagConfig(10, 8, "t", feature_names=["f"])])
    return torch.nn.ModuleDict({"bags": bags, "dense": torch.nn.Linear(8, 1)})


def test_model_takes_torchrecs_arguments() -> None:
    env = sw.ShardingEnv.local(device_type="cpu")
    wrapper = sw.DefaultDataParallelWrapper()
    made = DistributedModelParallel(model(), env, init_parameters=False, data_parallel_wrapper=wrapper)
    assert [name for name, _ in made.bare_named_parameters()] == ["dense.weight", "dense.bias"]
    assert made.sparse_grad_parameter_names() == []
    assert get_unwrapped_module(made) is made.module

    class Own:
        def wrap(self, dmp: Any, env: Any, device: Any) -> None: ...

    with pytest.raises(sw.UnsupportedError, match=r"data_parallel_wrapper=Own.*init_data_parallel=False"):
        DistributedModelParallel(model(), env, data_parallel_wrapper=Own())  # type: ignore[arg-type]
    with pytest.raises(sw.UnsupportedError, match="model_tracker_configs"):
        DistributedModelParallel(model(), env, model_tracker_configs=object())


def test_sharder_takes_the_registry_of_codecs() -> None:
    registry = get_qcomm_codecs_registry(sw.QCommsConfig(forward_precision="half"), device="cpu")
    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)
    assert sharder.qcomm_codecs_registry == sw.QCommsConfig("fp16")
    with raises(sw.UnsupportedError, subject="comm_ops", asked=["POOLED_EMBEDDINGS_ALL_TO_ALL"]):
        get_qcomm_codecs_registry(sw.QCommsConfig(), comm_ops=["POOLED_EMBEDDINGS_ALL_TO_ALL"])


def test_quantizing_takes_torchrecs_arguments() -> None:
    quantized = quantize_inference_model(model(), fp_weight_dtype=torch.int8)
    sharded, plan = shard_quant_model(quantized, sharders=DEFAULT_SHARDERS, ddr_cap=10**9)
    assert type(quantized["bags"]) in DEFAULT_QUANT_MAPPING.values()  # type: ignore[index]
    assert isinstance(sharded["bags"], serving.PlacedQuantEmbeddingBagCollection)  # type: ignore[index]
    assert list(plan.plan) == ["bags"]
    assert trim_torch_package_prefix_from_typename("<torch_package_0>.a.B") == "a.B"
    assert trim_torch_package_prefix_from_typename("a.B") == "a.B"
    with pytest.raises(sw.UnsupportedError, match="fp_weight_dtype"):
        quantize_inference_model(model(), fp_weight_dtype=torch.float16)
