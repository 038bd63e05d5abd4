"""Train a query tower and an item tower, export the query tower, and find items by an index of their vectors."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from shardwright_serving import export_for_inference, load_package
from torch import nn

import shardwright as sw

USERS, ITEMS, TOPICS, DIM, BATCH = 1000, 800, 20, 16, 512
topic_of_user, topic_of_item = (
    torch.randint(TOPICS, (rows,), generator=torch.Generator().manual_seed(rows)) for rows in (USERS, ITEMS)
)
likes = 0.03 + torch.eye(TOPICS)[:, topic_of_item]  # weight of each item for users of each topic


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw batch number ``number``: users, three items that each has seen, often of their topic, and one taken next."""
    drawn = torch.Generator().manual_seed(number)
    users = torch.randint(USERS, (BATCH,), generator=drawn)
    liked = torch.multinomial(likes[topic_of_user[users]], 4, generator=drawn)
    return users, liked[:, :3], liked[:, 3]


class Tower(nn.Module):
    """Vectors of length 1 from some features."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        tables = [
            sw.EmbeddingBagConfig(rows, DIM, name, feature_names=[name]) for name, rows in sizes.items()
        ]
        self.bags = sw.EmbeddingBagCollection(tables)
        self.over = nn.Sequential(nn.Linear(len(tables) * DIM, 32), nn.ReLU(), nn.Linear(32, DIM))

    def forward(self, features: sw.KeyedJaggedTensor) -> torch.Tensor:
        """Vectors, [samples, DIM]."""
        return nn.functional.normalize(self.over(self.bags(features).values()), dim=1)


class TwoTowers(nn.Module):
    """Both towers; a training step compares each query with all items of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.item = Tower({"user": USERS, "seen": ITEMS}), Tower({"item": ITEMS})

    def forward(self, queries: sw.KeyedJaggedTensor, items: sw.KeyedJaggedTensor) -> torch.Tensor:
        """Loss of the softmax over the items of the batch."""
        scores = self.query(queries) @ self.item(items).T / 0.1
        return nn.functional.cross_entropy(scores, torch.arange(len(scores)))


def queries_of(users: torch.Tensor, seen: torch.Tensor) -> sw.KeyedJaggedTensor:
    """Make the features of the query tower."""
    return sw.KeyedJaggedTensor.from_lists({"user": users[:, None].tolist(), "seen": seen.tolist()})


def items_of(items: torch.Tensor) -> sw.KeyedJaggedTensor:
    """Make the feature of the item tower."""
    return sw.KeyedJaggedTensor.from_lists({"item": items[:, None].tolist()})


def nearest(vectors: torch.Tensor, queries: torch.Tensor, count: int) -> torch.Tensor:
    """Find the items with the largest products, [queries, count]: by faiss where it is installed, else by torch."""
    try:
        import faiss
    except ModuleNotFoundError:
        return (queries @ vectors.T).topk(count).indices
    index = faiss.IndexHNSWFlat(vectors.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
    index.add(vectors.numpy())
    return torch.from_numpy(index.search(queries.numpy(), count)[1])


def train(steps: int) -> sw.DistributedModelParallel:
    """Train the sharded towers on all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    fused = {"optimizer": "adam", "learning_rate": 0.01}
    sharders = [sw.EmbeddingBagCollectionSharder(fused_params=fused)]
    model = sw.DistributedModelParallel(TwoTowers(), sharders=sharders)
    dense = dict(sw.in_backward_optimizer_filter(model.named_parameters()))
    optimizer = torch.optim.Adam(dense.values(), lr=0.01)
    for number in range(steps):
        users, seen, taken = (column[rank::ranks] for column in batch(number))
        optimizer.zero_grad()
        model(queries_of(users, seen), items_of(taken)).backward()
        optimizer.step()
    return model


def search(towers: TwoTowers, folder: Path) -> float:
    """Export the query tower, index all items, and return the share of found items that have the user's topic."""
    users, seen, _ = batch(10_000)
    queries = queries_of(users, seen)
    package = export_for_inference(towers.query, queries, folder, precision="INT8", forms=["exported"])
    with torch.no_grad():
        vectors = towers.item(items_of(torch.arange(ITEMS)))
    (found_queries,) = load_package(package).predict(queries).values()
    found = nearest(vectors, found_queries, 10)
    return (topic_of_item[found] == topic_of_user[users][:, None]).float().mean().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path, help="folder to write the package to")
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    state = train(options.steps).full_state_dict()
    if dist.get_rank() == 0:
        towers = TwoTowers()
        towers.load_state_dict(state)
        found = search(towers, options.package)
        print(f"of the user's topic: {found:.2f} of the items found, {1 / TOPICS:.2f} of all")
    dist.destroy_process_group()
