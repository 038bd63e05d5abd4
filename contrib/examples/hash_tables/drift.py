"""Follow items that come and go: a table of any 64-bit id beside one of ids modulo its rows."""

import argparse

import torch
import torch.distributed as dist
from shardwright_hash_embedding import HashSettings

import shardwright as sw

ALIVE, BORN, ROWS, DIM, BATCH, STEPS = 1000, 250, 2000, 8, 1000, 40


def items_of(day: int) -> torch.Tensor:
    """Ids of the items that exist on a day, 64 bits each: every day a quarter goes and as many others come."""
    serial = torch.arange(day * BORN, day * BORN + ALIVE)
    return (serial + 1) * -0x61C8864680B583EB  # as a hash of a name would be: any number


def liked(ids: torch.Tensor) -> torch.Tensor:
    """Logits of a click, which follow from an item's id alone, [ids]."""
    return 4.0 * ((ids >> 20) & 1) - 2.0


def batch(day: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the items of a step and whether they were clicked, the same for any number of ranks."""
    drawn = torch.Generator().manual_seed(1000 * day + step)
    ids = items_of(day)[torch.randint(ALIVE, (BATCH,), generator=drawn)]
    return ids, (torch.rand(BATCH, generator=drawn) < liked(ids).sigmoid()).float()


def shard(constraints: sw.ParameterConstraints) -> sw.DistributedModelParallel:
    """Shard a table whose rows have one weight of use each: the logit of a click."""
    table = sw.EmbeddingBagConfig(name="item", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["item"])
    module = sw.EmbeddingBagCollection([table], device="meta")
    fused = {"optimizer": "adagrad", "learning_rate": 0.3}
    sharders = [sw.EmbeddingBagCollectionSharder(fused_params=fused)]
    planner = sw.EmbeddingShardingPlanner(
        batch_size=BATCH // dist.get_world_size(), constraints={"item": constraints}
    )
    plan = planner.collective_plan(module, sharders)
    return sw.DistributedModelParallel(module, plan=plan, sharders=sharders)


def loss_of(model: sw.DistributedModelParallel, ids: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
    """Log loss of a batch."""
    logits = model(sw.KeyedJaggedTensor(["item"], ids, lengths=torch.ones(len(ids)).int())).values().sum(1)
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, clicked)


def train(days: int) -> list[dict[str, float]]:
    """Train both models day after day; return their log losses at the end of each day, the same on every rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    hashed = shard(HashSettings(evict="lru").constraints())
    modulo = shard(sw.ParameterConstraints(sharding_types=["row_wise"]))
    losses = []
    for day in range(days):
        for step in range(STEPS):
            ids, clicked = (column[rank::ranks] for column in batch(day, step))
            loss_of(hashed, ids, clicked).backward()
            loss_of(modulo, ids % ROWS, clicked).backward()
        with torch.no_grad():
            ids, clicked = (column[rank::ranks] for column in batch(day, STEPS))
            both = torch.stack([loss_of(hashed, ids, clicked), loss_of(modulo, ids % ROWS, clicked)])
        dist.all_reduce(both)
        losses.append(dict(zip(("hashed", "modulo"), (both / ranks).tolist(), strict=True)))
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=8)
    days = parser.parse_args().days
    dist.init_process_group("gloo")
    losses = train(days)
    if dist.get_rank() == 0:
        for day, loss in enumerate(losses):
            print(f"day {day}: log loss {loss['hashed']:.3f} by id, {loss['modulo']:.3f} by id modulo {ROWS}")
    dist.destroy_process_group()
