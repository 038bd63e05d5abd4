"""What the ranks do that serve quantized tables; importable by their processes."""

from __future__ import annotations

import copy
from typing import Any

import shardwright_serving as serving
import torch
from shardwright_serving import plugin

import shardwright as sw
from shardwright.host import PluginHost, use_host


def model() -> Any:
    """Quantized bags and sequences, the same on every rank."""
    torch.manual_seed(5)
    bags = [
        sw.EmbeddingBagConfig(
            name=name, num_embeddings=rows, embedding_dim=32, feature_names=[name], pooling=pooling
        )
        for name, rows, pooling in (("a", 50, "SUM"), ("b", 40, "MEAN"), ("c", 30, "SUM"))
    ]
    ids = [sw.EmbeddingConfig(name="s", num_embeddings=20, embedding_dim=16, feature_names=["s"])]
    both = torch.nn.ModuleDict({"bags": sw.EmbeddingBagCollection(bags), "ids": sw.EmbeddingCollection(ids)})
    return serving.quantize_embeddings(both, "INT8", per_table={"b": "INT4", "s": "FP8"})


def batch(rank: int) -> sw.KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.randint(0, 5, (4, 3 + rank), generator=generator)
    values = torch.randint(20, (int(lengths.sum()),), generator=generator)
    return sw.KeyedJaggedTensor(["a", "b", "c", "s"], values, lengths=lengths.flatten().int())


def serve_by(sharding_type: str) -> float:
    """Serve with the plugin of quantized tables; see :func:`_served`."""
    with use_host(PluginHost(plugins={"serving": plugin})):
        return _served(sharding_type)


def _served(sharding_type: str) -> float:
    """Serve one batch by a plan that the ranks make together; the largest difference from the unsharded model's.

    ``"serving"`` stands for what the planner chooses for serving, where there is memory for copies.
    """
    chosen: dict[str, Any] = (
        {"objective": "serving"}
        if sharding_type == "serving"
        else {"constraints": {"*": sw.ParameterConstraints(sharding_types=[sharding_type])}}
    )
    unsharded = model()
    sharders = [serving.QuantEmbeddingBagCollectionSharder(), serving.QuantEmbeddingCollectionSharder()]
    plan = sw.EmbeddingShardingPlanner(**chosen).collective_plan(
        unsharded, sharders, torch.distributed.group.WORLD
    )
    kernels = {own.compute_kernel for module in plan.plan.values() for own in module.values()}
    assert all(name.startswith("quant_") for name in kernels), kernels
    if sharding_type == "serving":
        assert {own.sharding_type for module in plan.plan.values() for own in module.values()} == {
            "data_parallel"
        }
    served = sw.DistributedModelParallel(copy.deepcopy(unsharded), plan=plan, device="cpu")
    features, largest = batch(torch.distributed.get_rank()), 0.0
    with torch.no_grad():
        for _ in range(2):
            bags = served.module["bags"](features).values() - unsharded["bags"](features).values()
            ids = served.module["ids"](features)["s"].values() - unsharded["ids"](features)["s"].values()
            largest = max([largest, *(float(own.abs().max()) for own in (bags, ids) if own.numel())])
    assert all(
        torch.equal(value, unsharded.state_dict()[name]) for name, value in served.full_state_dict().items()
    )
    return largest
