"""Predict ratings by matrix factorisation, with the tables of users and movies sharded over the ranks."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist

import shardwright as sw

DIM, BATCH, NOISE = 32, 1000, 0.5


def drawn_ratings(users: int = 600, movies: int = 400, count: int = 60_000) -> torch.Tensor:
    """Draw ratings [count, 3] from biases, tastes of four dimensions, and noise."""
    drawn = torch.Generator().manual_seed(0)
    user = torch.randint(users, (count,), generator=drawn)
    movie = (movies * torch.rand(count, generator=drawn) ** 2).long()
    user_bias, movie_bias = (0.4 * torch.randn(rows, generator=drawn) for rows in (users, movies))
    tastes, traits = (0.5 * torch.randn(rows, 4, generator=drawn) for rows in (users, movies))
    rating = 3.5 + user_bias[user] + movie_bias[movie] + (tastes[user] * traits[movie]).sum(1)
    rating += NOISE * torch.randn(count, generator=drawn)
    return torch.stack([user.float(), movie.float(), rating], 1)


def read_ratings(path: Path) -> torch.Tensor:
    """Read ``ratings.dat`` of MovieLens 1M, lines of ``user::movie::rating::time``, and shuffle it."""
    lines = path.read_text().splitlines()
    ratings = torch.tensor([[float(word) for word in line.split("::")[:3]] for line in lines])
    return ratings[torch.randperm(len(ratings), generator=torch.Generator().manual_seed(0))]


class Ratings(torch.nn.Module):
    """A rating is the mean, a bias of the user, a bias of the movie, and the product of their vectors."""

    def __init__(self, users: int, movies: int, mean: float) -> None:
        super().__init__()
        self.mean = mean
        sizes = {
            "user": (users, DIM),
            "movie": (movies, DIM),
            "user_bias": (users, 4),
            "movie_bias": (movies, 4),
        }
        tables = [
            sw.EmbeddingBagConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=columns,
                feature_names=[name.removesuffix("_bias")],
                init_fn=lambda weight: weight.normal_(std=0.1),
            )
            for name, (rows, columns) in sizes.items()
        ]
        self.bags = sw.EmbeddingBagCollection(tables)

    def forward(self, features: sw.KeyedJaggedTensor) -> torch.Tensor:
        """Predict the ratings of a batch, [samples]."""
        found = self.bags(features)
        product = (found["user@user"] * found["movie@movie"]).sum(1)
        return self.mean + product + found["user@user_bias"][:, 0] + found["movie@movie_bias"][:, 0]


def features_of(ratings: torch.Tensor) -> sw.KeyedJaggedTensor:
    """Make a batch with one user and one movie a sample."""
    ids = ratings[:, :2].long()
    return sw.KeyedJaggedTensor(["user", "movie"], ids.T.flatten(), lengths=torch.ones(ids.numel()).int())


def train(ratings: torch.Tensor, epochs: int) -> dict[str, float]:
    """Train on nine tenths of the ratings; return root mean squared errors on the rest, the same on every rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    training, held_out = ratings.split([len(ratings) * 9 // 10, len(ratings) - len(ratings) * 9 // 10])
    users, movies = (int(ratings[:, column].max()) + 1 for column in (0, 1))
    mean = training[:, 2].mean().item()
    fused = {"optimizer": "adagrad", "learning_rate": 0.1}
    sharders = [sw.EmbeddingBagCollectionSharder(fused_params=fused)]
    planner = sw.EmbeddingShardingPlanner(batch_size=BATCH // ranks)
    model = Ratings(users, movies, mean)
    plan = planner.collective_plan(model, sharders)
    model = sw.DistributedModelParallel(model, plan=plan, sharders=sharders)
    for epoch in range(epochs):
        shuffled = torch.randperm(len(training), generator=torch.Generator().manual_seed(epoch))
        for chosen in shuffled.split(BATCH):
            own = training[chosen[rank::ranks]]
            loss = torch.nn.functional.mse_loss(model(features_of(own)), own[:, 2])
            loss.backward()  # updates the tables; nothing else is trained
    own = held_out[rank::ranks]
    with torch.no_grad():
        predicted = model(features_of(own))
    squares = torch.stack([(own[:, 2] - mean).square().sum(), (own[:, 2] - predicted).square().sum()])
    dist.all_reduce(squares)
    of_mean, of_model = (squares / len(held_out)).sqrt().tolist()
    return {"mean": of_mean, "model": of_model}


def main() -> None:
    """Train on drawn ratings, or on those of a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--ratings", type=Path, help="ratings.dat of MovieLens 1M; by default ratings are drawn"
    )
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    ratings = read_ratings(options.ratings) if options.ratings else drawn_ratings()
    errors = train(ratings, options.epochs)
    if dist.get_rank() == 0:
        print(f"error of the mean {errors['mean']:.3f}, of the model {errors['model']:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
