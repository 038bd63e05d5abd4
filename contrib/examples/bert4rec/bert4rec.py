"""Learn what a user does next from sequences of items, as BERT4Rec does, with the table of items sharded.

Items of a sequence are masked and predicted (Sun et al., arXiv:1904.06690). The true item competes with drawn ones, so
that a step looks up a few rows of the table and never the whole of it.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw

ITEMS, DIM, LENGTH, BATCH, CANDIDATES = 500, 32, 12, 256, 32
MASK = ITEMS  # the last row of the table stands for a masked item


def sequences(number: int) -> torch.Tensor:
    """Draw batch number ``number`` of sequences, [BATCH, LENGTH]: in eight of ten cases an item has one follower."""
    follower = torch.randperm(ITEMS, generator=torch.Generator().manual_seed(0))
    drawn = torch.Generator().manual_seed(number + 1)
    items = torch.randint(ITEMS, (BATCH, LENGTH), generator=drawn)
    goes_on = torch.rand(BATCH, LENGTH, generator=drawn) < 0.8
    for place in range(1, LENGTH):
        items[:, place] = torch.where(goes_on[:, place], follower[items[:, place - 1]], items[:, place])
    return items


class Bert4Rec(nn.Module):
    """A transformer over the vectors of a sequence; an item's score is the product with its vector."""

    def __init__(self) -> None:
        super().__init__()
        start = {"weight_init_min": -0.2, "weight_init_max": 0.2}
        features = ["sequence", "candidates"]
        table = sw.EmbeddingConfig(ITEMS + 1, DIM, "item", feature_names=features, **start)
        self.items = sw.EmbeddingCollection([table])
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, DIM))
        layer = nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, features: sw.KeyedJaggedTensor, masked: torch.Tensor) -> torch.Tensor:
        """Scores of the candidates for the masked place of each sequence.

        Args:
            features: LENGTH items and CANDIDATES items of each sample.
            masked: masked place of each sample, [samples].

        Returns:
            Scores, [samples, CANDIDATES].
        """
        found = self.items(features)
        sequence = found["sequence"].values().view(-1, LENGTH, DIM)
        candidates = found["candidates"].values().view(-1, CANDIDATES, DIM)
        encoded = self.encoder(sequence + self.places)
        return (candidates @ encoded[torch.arange(len(masked)), masked, :, None]).squeeze(2)


def batch_of(number: int, masks_last: bool) -> tuple[sw.KeyedJaggedTensor, torch.Tensor]:
    """Make this rank's share of a batch. The first candidate is the true item.

    Args:
        number: number of the batch, whose sequences are the same for any number of ranks.
        masks_last: whether the last item is masked, as a recommendation needs it, or any.
    """
    items = sequences(number)
    drawn = torch.Generator().manual_seed(-number - 1)
    any_place = torch.randint(LENGTH, (BATCH,), generator=drawn)
    masked = torch.full_like(any_place, LENGTH - 1) if masks_last else any_place
    true = items.gather(1, masked[:, None])
    # A drawn item that is the true one is moved to the next.
    others = torch.randint(ITEMS, (BATCH, CANDIDATES - 1), generator=drawn)
    others = torch.where(others == true, (others + 1) % ITEMS, others)
    items = items.scatter(1, masked[:, None], MASK)
    own = slice(dist.get_rank(), None, dist.get_world_size())
    ids = {"sequence": items[own], "candidates": torch.cat([true, others], 1)[own]}
    lengths = torch.cat([torch.full((len(value),), value.shape[1]) for value in ids.values()])
    values = torch.cat([value.flatten() for value in ids.values()])
    return sw.KeyedJaggedTensor(list(ids), values, lengths=lengths.int()), masked[own]


def train(steps: int) -> dict[str, float]:
    """Train; return the share of held-out sequences whose next item has the highest score, and that by chance."""
    torch.manual_seed(0)
    fused = {"optimizer": "adam", "learning_rate": 0.005}
    sharders = [sw.EmbeddingCollectionSharder(fused_params=fused)]
    model, planner = Bert4Rec(), sw.EmbeddingShardingPlanner(batch_size=BATCH // dist.get_world_size())
    plan = planner.collective_plan(model, sharders)
    model = sw.DistributedModelParallel(model, plan=plan, sharders=sharders)
    dense = [weight for _, weight in sw.in_backward_optimizer_filter(model.named_parameters())]
    optimizer = torch.optim.Adam(dense, lr=0.005)
    for number in range(steps):
        optimizer.zero_grad()
        features, masked = batch_of(number, masks_last=number % 2 == 0)
        scores = model(features, masked)
        loss = nn.functional.cross_entropy(scores, torch.zeros(len(scores)).long())
        loss.backward()
        optimizer.step()
    hits = torch.zeros(2)
    with torch.no_grad():
        for number in range(10_000, 10_004):
            scores = model(*batch_of(number, masks_last=True))
            hits += torch.tensor([(scores.argmax(1) == 0).sum(), len(scores)])
    dist.all_reduce(hits)
    return {"hits": (hits[0] / hits[1]).item(), "chance": 1 / CANDIDATES}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")
    shares = train(steps)
    if dist.get_rank() == 0:
        print(f"next item found {shares['hits']:.2f}, by chance {shares['chance']:.2f}")
    dist.destroy_process_group()
