"""TorchRec's sharding and introduction tutorials, as each rank runs them: CUDA replaced by the CPU, nothing else."""

from __future__ import annotations

import copy
import warnings
from typing import Any, cast

import torch
import torch.distributed as dist

import shardwright
from shardwright import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbeddingComputeKernel,
    EmbeddingShardingPlanner,
    ModuleSharder,
    ParameterConstraints,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
    Topology,
    in_backward_optimizer_filter,
)

LARGE_TABLE_COUNT = SMALL_TABLE_COUNT = 2
SHARDING_TABLES = [
    shardwright.EmbeddingBagConfig(
        name=f"{size}_table_{i}",
        embedding_dim=64,
        num_embeddings=rows,
        feature_names=[f"{size}_table_feature_{i}"],
        pooling=shardwright.PoolingType.SUM,
    )
    for size, rows, count in (("large", 4096, LARGE_TABLE_COUNT), ("small", 1024, SMALL_TABLE_COUNT))
    for i in range(count)
]


def gen_constraints(sharding_type: str) -> dict[str, ParameterConstraints]:
    return {
        table.name: ParameterConstraints(
            sharding_types=[sharding_type], compute_kernels=[EmbeddingComputeKernel.FUSED.value]
        )
        for table in SHARDING_TABLES
    }


def single_rank_execution(
    sharding_type_name: str, module: torch.nn.Module
) -> tuple[str, list[str], list[str]]:
    """The sharding tutorial's function of that name. Returns the plan, names of what is here, and the output's keys."""
    sharding_type = getattr(ShardingType, sharding_type_name)
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    pg = dist.group.WORLD
    planner = EmbeddingShardingPlanner(topology=topology, constraints=gen_constraints(sharding_type.value))
    sharders = [cast(ModuleSharder[torch.nn.Module], EmbeddingBagCollectionSharder())]
    plan: ShardingPlan = planner.collective_plan(module, sharders, pg)
    sharded_model = DistributedModelParallel(
        module,
        env=ShardingEnv.from_process_group(pg),
        plan=plan,
        sharders=sharders,
        device=torch.device("cpu"),
    )
    output = sharded_model(
        shardwright.KeyedJaggedTensor(
            keys=[table.feature_names[0] for table in SHARDING_TABLES],
            values=torch.arange(8),
            lengths=torch.ones(8, dtype=torch.int32),
        )
    )
    output.values().sum().backward()
    here = [name for name, own in sharded_model.named_parameters() if own.numel()]
    return f"{plan.plan}", here, output.keys()


def introduction_collection() -> shardwright.EmbeddingBagCollection:
    torch.manual_seed(5)  # ranks hand their own weights in: they must be the same
    return shardwright.EmbeddingBagCollection(
        device="cpu",
        tables=[
            shardwright.EmbeddingBagConfig(
                name=f"{name}_table",
                embedding_dim=64,
                num_embeddings=4096,
                feature_names=[name],
                pooling=shardwright.PoolingType.SUM,
            )
            for name in ("product", "user")
        ],
    )


def introduction_batch() -> shardwright.KeyedJaggedTensor:
    product_jt = shardwright.JaggedTensor(values=torch.tensor([1, 2, 1, 5]), lengths=torch.tensor([3, 1]))
    user_jt = shardwright.JaggedTensor(values=torch.tensor([2, 3, 4, 1]), lengths=torch.tensor([2, 2]))
    return shardwright.KeyedJaggedTensor.from_jt_dict({"product": product_jt, "user": user_jt})


def introduction_plan(ebc: Any, sharder: Any) -> tuple[ShardingPlan, ShardingEnv]:
    pg = dist.GroupMember.WORLD
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device="cpu")
    )
    return planner.collective_plan(ebc, [sharder], pg), ShardingEnv.from_process_group(pg)


def introduction_sharding() -> dict[str, Any]:
    """From 'Distributed Embeddings' to 'DistributedModelParallel'."""
    ebc, kjt = introduction_collection(), introduction_batch()
    expected = ebc(kjt)
    sharder = EmbeddingBagCollectionSharder()
    plan, env = introduction_plan(ebc, sharder)
    sharded_ebc = sharder.shard(ebc, plan.plan[""], env, torch.device("cpu"))
    output = sharded_ebc(kjt)
    printed = str(output)
    kt = output.wait()
    model = DistributedModelParallel(ebc, device=torch.device("cpu"))
    out = model(kjt)
    return {
        "plan": f"{plan}",
        "anatomy": f"{sharded_ebc}",
        "dists": [
            str(part) for part in (sharded_ebc._input_dists, sharded_ebc._lookups, sharded_ebc._output_dists)
        ],
        "printed": printed,
        "type": type(kt).__name__,
        "keys": kt.keys(),
        "shapes": {key: tuple(embedding.shape) for key, embedding in kt.to_dict().items()},
        "equal": torch.allclose(kt.values(), expected.values()),
        "equal in model": torch.allclose(out.wait().values(), expected.values()),
        "model": str(model),
    }


def introduction_optimizers(optimizer: Any, torchs_function: bool) -> dict[str, Any]:
    """'Adding in the Optimizer': fused parameters, then an optimizer applied in the backward pass."""
    ebc, kjt = introduction_collection(), introduction_batch()
    sharder = EmbeddingBagCollectionSharder()
    plan, env = introduction_plan(ebc, sharder)
    sharded_ebc = sharder.shard(ebc, plan.plan[""], env, torch.device("cpu"))
    fused_params = {"optimizer": optimizer, "learning_rate": 0.02, "eps": 0.002}
    sharder_with_fused_params = EmbeddingBagCollectionSharder(fused_params=fused_params)
    sharded_ebc_fused_params = sharder_with_fused_params.shard(ebc, plan.plan[""], env, torch.device("cpu"))
    ebc_apply_opt = copy.deepcopy(ebc)
    optimizer_kwargs = {"lr": 0.5}
    for _, param in ebc_apply_opt.named_parameters():
        apply_function(torchs_function)(torch.optim.SGD, [param], optimizer_kwargs)
    sharded_ebc_apply_opt = sharder.shard(ebc_apply_opt, plan.plan[""], env, torch.device("cpu"))
    left_over = dict(in_backward_optimizer_filter(sharded_ebc_fused_params.named_parameters())).keys()
    losses = [
        first_and_second_loss(module, kjt) for module in (sharded_ebc_fused_params, sharded_ebc_apply_opt)
    ]
    return {
        "original": f"{sharded_ebc.fused_optimizer}",
        "fused params": f"{sharded_ebc_fused_params.fused_optimizer}",
        "applied": f"{sharded_ebc_apply_opt.fused_optimizer}",
        "is keyed": isinstance(sharded_ebc_fused_params.fused_optimizer, shardwright.KeyedOptimizer),
        "left over": list(left_over),
        "losses": losses,
        "weights": [module.state_dict() for module in (sharded_ebc_fused_params, sharded_ebc_apply_opt)],
    }


def apply_function(torchs: bool) -> Any:
    if not torchs:
        return shardwright.apply_optimizer_in_backward
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import _apply_optimizer_in_backward
    return _apply_optimizer_in_backward


def first_and_second_loss(module: Any, kjt: shardwright.KeyedJaggedTensor) -> tuple[float, float]:
    ebc_output = module(kjt).wait().values()
    loss = torch.sum(torch.ones_like(ebc_output) - ebc_output)
    loss.backward()
    ebc_output = module(kjt).wait().values()
    return loss.item(), torch.sum(torch.ones_like(ebc_output) - ebc_output).item()
