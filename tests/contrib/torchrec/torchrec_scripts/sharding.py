"""TorchRec's sharding tutorial. Adapted: the CPU and gloo for CUDA and NCCL, the standard library's multiprocessing for
the package multiprocess (hence the guard), a free port. `plan` is printed as a table, like that of later TorchRec
releases; `plan.plan`, printed after it, is what the tutorial shows."""

import os
import sys
from typing import Dict, cast  # noqa: UP035

import torch
import torch.nn as nn
import torchrec
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingType

os.environ["MASTER_ADDR"] = "localhost"
os.environ.setdefault("MASTER_PORT", "29500")

large_table_cnt = 2
small_table_cnt = 2
large_tables = [
    torchrec.EmbeddingBagConfig(
        name="large_table_" + str(i),
        embedding_dim=64,
        num_embeddings=4096,
        feature_names=["large_table_feature_" + str(i)],
        pooling=torchrec.PoolingType.SUM,
    )
    for i in range(large_table_cnt)
]
small_tables = [
    torchrec.EmbeddingBagConfig(
        name="small_table_" + str(i),
        embedding_dim=64,
        num_embeddings=1024,
        feature_names=["small_table_feature_" + str(i)],
        pooling=torchrec.PoolingType.SUM,
    )
    for i in range(small_table_cnt)
]


def gen_constraints(
    sharding_type: ShardingType = ShardingType.TABLE_WISE,
) -> Dict[str, ParameterConstraints]:  # noqa: UP006
    large_table_constraints = {
        "large_table_" + str(i): ParameterConstraints(
            sharding_types=[sharding_type.value],
            compute_kernels=[EmbeddingComputeKernel.BATCHED_FUSED.value],
        )
        for i in range(large_table_cnt)
    }
    small_table_constraints = {
        "small_table_" + str(i): ParameterConstraints(
            sharding_types=[sharding_type.value],
            compute_kernels=[EmbeddingComputeKernel.BATCHED_FUSED.value],
        )
        for i in range(small_table_cnt)
    }
    constraints = {**large_table_constraints, **small_table_constraints}
    return constraints


def single_rank_execution(
    rank: int,
    world_size: int,
    constraints: Dict[str, ParameterConstraints],  # noqa: UP006
    module: nn.Module,
    backend: str,
) -> None:
    import torch.distributed as dist
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan

    def init_distributed_single_host(rank: int, world_size: int, backend: str) -> dist.ProcessGroup:
        os.environ["RANK"] = f"{rank}"
        os.environ["WORLD_SIZE"] = f"{world_size}"
        dist.init_process_group(rank=rank, world_size=world_size, backend=backend)
        return dist.group.WORLD

    device = torch.device("cpu")
    topology = Topology(world_size=world_size, compute_device="cpu")
    pg = init_distributed_single_host(rank, world_size, backend)
    planner = EmbeddingShardingPlanner(
        topology=topology,
        constraints=constraints,
    )
    sharders = [cast(ModuleSharder[torch.nn.Module], EmbeddingBagCollectionSharder())]
    plan: ShardingPlan = planner.collective_plan(module, sharders, pg)

    sharded_model = DistributedModelParallel(
        module,
        env=ShardingEnv.from_process_group(pg),
        plan=plan,
        sharders=sharders,
        device=device,
    )
    # One write: the ranks share a pipe.
    sys.stdout.write(f"{plan}\nrank:{rank},sharding plan: {plan.plan}\n")
    sys.stdout.flush()
    del sharded_model
    dist.destroy_process_group()


def spmd_sharing_simulation(
    sharding_type: ShardingType = ShardingType.TABLE_WISE,
    world_size=2,
):
    import multiprocessing

    ctx = multiprocessing.get_context("forkserver")
    processes = []
    for rank in range(world_size):
        p = ctx.Process(
            target=single_rank_execution,
            args=(rank, world_size, gen_constraints(sharding_type), ebc, "gloo"),
        )
        p.start()
        processes.append(p)

    for p in processes:
        p.join()
        assert p.exitcode == 0


if __name__ == "__main__":
    ebc = torchrec.EmbeddingBagCollection(device="cpu", tables=large_tables + small_tables)
    for name in sys.argv[1:]:
        spmd_sharing_simulation(getattr(ShardingType, name))
