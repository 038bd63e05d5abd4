"""A TorchRec script that spawns its ranks, transfers pretrained tables, and saves and loads state dicts by rank.

The shape of TorchRec's transfer-learning and checkpoint examples: `mp.spawn`; one rank looks at `state_dict()` alone;
each saves its own shards with `torch.save`, and all together with `torch.distributed.checkpoint`. Argument: a folder.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import torchrec
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardedTensor, ShardingType
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

TYPES = {
    "table": ShardingType.TABLE_WISE,
    "row": ShardingType.ROW_WISE,
    "column": ShardingType.COLUMN_WISE,
    "copies": ShardingType.DATA_PARALLEL,
}


def build_model() -> torch.nn.Module:
    torch.manual_seed(0)
    tables = [
        torchrec.EmbeddingBagConfig(name=name, num_embeddings=11, embedding_dim=16, feature_names=[name])
        for name in TYPES
    ]
    return torch.nn.Sequential(torchrec.EmbeddingBagCollection(tables=tables))


def shard(model: torch.nn.Module) -> DistributedModelParallel:
    constraints = {
        name: ParameterConstraints(sharding_types=[kind.value], min_partition=8)
        for name, kind in TYPES.items()
    }
    topology = Topology(world_size=2, compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints, debug=False)
    sharders = [EmbeddingBagCollectionSharder()]
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    return DistributedModelParallel(model, plan=plan, sharders=sharders)


def local(state):
    return {
        name: [shard.tensor.clone() for shard in value.local_shards()]
        if isinstance(value, ShardedTensor)
        else [value.clone()]
        for name, value in state.items()
    }


def equal(one, other) -> bool:
    return all(
        torch.equal(mine, theirs) for name in one for mine, theirs in zip(one[name], other[name], strict=True)
    )


def main(rank: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost")
    dist.init_process_group("gloo")
    pretrained = build_model().state_dict()
    model = shard(build_model())
    with torch.no_grad():
        model.load_state_dict({name: 2 * value for name, value in pretrained.items()})
    batch = torchrec.KeyedJaggedTensor(
        keys=list(TYPES), values=torch.arange(8) + rank, lengths=torch.ones(8, dtype=torch.int64)
    )
    optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.Adagrad(params, lr=0.1),
    )
    before = local(model.state_dict())
    model(batch).values().sum().backward()
    optimizer.step()
    saved = local(model.state_dict())
    is_updated = not torch.equal(
        before["0.embedding_bags.copies.weight"][0], saved["0.embedding_bags.copies.weight"][0]
    )

    if rank == 0:  # alone: nobody waits
        state = model.state_dict()
        sharded = sorted(
            name.split(".")[2] for name, value in state.items() if isinstance(value, ShardedTensor)
        )
        whole = sorted(
            name.split(".")[2] for name, value in state.items() if not isinstance(value, ShardedTensor)
        )
        sys.stdout.write(f"rank 0: sharded {sharded}, whole {whole}\n")
        assert model.state_dict()["0.embedding_bags.row.weight"].metadata().size == torch.Size([11, 16])
    torch.save(model.state_dict(), f"{folder}/{rank}.pt")
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/dcp")

    other = shard(build_model())
    other.load_state_dict(torch.load(f"{folder}/{rank}.pt", weights_only=False))
    is_loaded = equal(local(other.state_dict()), saved)
    other = shard(build_model())
    state = other.state_dict()
    dcp.load({"model": state}, checkpoint_id=f"{folder}/dcp")
    other.load_state_dict(state)
    is_read = equal(local(other.state_dict()), saved)
    sys.stdout.write(
        f"rank {rank}: loaded equal: {is_loaded}, DCP equal: {is_read}, dense updated: {is_updated}\n"
    )
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, args=(sys.argv[1],), nprocs=2)
