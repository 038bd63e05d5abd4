"""A script of the shape of generative recommenders: next items of a sequence, checkpoints of model and optimizer.

Run by torchrun; the argument is a folder. The item table is an `EmbeddingCollection`, sharded by rows; an attention
layer over each sequence predicts the next item by sampled softmax. The model trains on from its checkpoint as without
it.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchrec
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardedTensor, ShardingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

ITEMS, DIM, LENGTH, BATCH, STEPS = 30, 16, 6, 16, 30


class Model(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        tables = [
            torchrec.EmbeddingConfig(
                name="item_table",
                embedding_dim=DIM,
                num_embeddings=ITEMS,
                feature_names=["history", "next"],
                init_fn=lambda weight: nn.init.normal_(weight, std=0.1),
            )
        ]
        self.items = torchrec.EmbeddingCollection(tables=tables, device=torch.device("meta"))
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True, device=device)

    def forward(self, kjt):
        found = self.items(kjt)
        history = found["history"].to_padded_dense(LENGTH)
        target = found["next"].values()
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        seen, _ = self.attention(history, history, history, attn_mask=mask, need_weights=False)
        last = found["history"].lengths().long() - 1
        query = (seen + history)[torch.arange(len(last)), last]
        logits = query @ target.T  # the other samples' items are the negatives
        return nn.functional.cross_entropy(logits, torch.arange(len(last)))


def batch(step: int, rank: int) -> torchrec.KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(2 * step + rank)
    lengths = torch.randint(1, LENGTH + 1, (BATCH,), generator=generator)
    first = torch.randperm(ITEMS, generator=generator)[:BATCH]
    # Each item is followed by the next number.
    history = torch.cat(
        [(start + torch.arange(int(n))) % ITEMS for start, n in zip(first, lengths, strict=True)]
    )
    return torchrec.KeyedJaggedTensor.from_lengths_sync(
        keys=["history", "next"],
        values=torch.cat([history, (first + lengths) % ITEMS]),
        lengths=torch.cat([lengths, torch.ones(BATCH, dtype=torch.int64)]),
    )


def build(device: torch.device):
    torch.manual_seed(0)
    model = Model(device)
    apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, model.items.parameters(), {"lr": 0.1})
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device=device.type),
        constraints={"item_table": ParameterConstraints(sharding_types=[ShardingType.ROW_WISE.value])},
        debug=False,
    )
    sharders = [EmbeddingCollectionSharder()]
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    model = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.0),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    optimizer.init_state()
    return model, optimizer


def train(model, optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(batch(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def main(folder: str) -> None:
    rank, device = int(os.environ["RANK"]), torch.device("cpu")
    dist.init_process_group("gloo")
    model, optimizer = build(device)
    losses = train(model, optimizer, range(STEPS))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    is_sharded = isinstance(state["model"]["items.embeddings.item_table.weight"], ShardedTensor)
    dcp.save(state, checkpoint_id=folder)
    on = train(model, optimizer, range(STEPS, STEPS + 5))

    other, its_optimizer = build(device)
    state = {"model": other.state_dict(), "optimizer": its_optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    its_optimizer.load_state_dict(state["optimizer"])
    again = train(other, its_optimizer, range(STEPS, STEPS + 5))
    sys.stdout.write(
        f"rank {rank}: table sharded: {is_sharded}, loss fell: {sum(losses[-5:]) < 0.8 * sum(losses[:5])}, "
        f"goes on as before: {on == again}\n"
    )
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
