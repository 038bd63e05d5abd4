"""Small packages to serve: two features, one of them weighted, and a dense input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

USERS, ITEMS = 10, 20
"""Rows of the tables."""
MANIFEST: dict[str, Any] = {
    "format": 1,
    "model": {"pt2": None, "exported": None, "torchscript": None, "tables": None},
    "features": [
        {"name": "user", "num_embeddings": USERS, "is_weighted": False},
        {"name": "item", "num_embeddings": ITEMS, "is_weighted": True},
    ],
    "dense": {"name": "dense", "columns": 2},
    "outputs": [{"name": "vector", "shape": [None, 2]}, {"name": "score", "shape": [None]}],
    "precision": {},
    "version": "1",
    "created_with": {},
}


class Small(nn.Module):
    """The sums of the users' rows and the dense input, and the sum of all columns of the items' rows."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.users = USERS
        self.register_buffer("rows", torch.arange(2.0 * (USERS + ITEMS)).reshape(-1, 2) * scale)

    def forward(
        self, values: Tensor, lengths: Tensor, weights: Tensor, dense: Tensor
    ) -> tuple[Tensor, Tensor]:
        samples = dense.shape[0]
        bags = torch.repeat_interleave(torch.arange(2 * samples), lengths, output_size=values.shape[0])
        rows = self.rows[values + torch.where(bags < samples, 0, self.users)] * weights.unsqueeze(1)
        sums = torch.zeros(2 * samples, 2).index_add(0, bags, rows)
        return sums[:samples] + dense, sums[samples:].sum(1)


def expected(request: dict[str, Any], scale: float = 1.0) -> dict[str, Any]:
    """Reckon the outputs sample by sample."""
    vectors, scores = [], []
    for index, dense in enumerate(request["dense"]):
        users = request["features"]["user"][index]
        items = zip(request["features"]["item"][index], request["weights"]["item"][index], strict=True)
        vectors.append(
            [sum(2 * user + column for user in users) * scale + dense[column] for column in (0, 1)]
        )
        scores.append(sum((4 * (item + USERS) + 1) * weight for item, weight in items) * scale)
    return {"vector": vectors, "score": scores}


def a_request(*users: int) -> dict[str, Any]:
    """Make a request with one sample for each user, who has seen as many items as its number says."""
    items = [[*range(user)] for user in users]
    return {
        "features": {"user": [[user] for user in users], "item": items},
        "weights": {"item": [[0.5] * len(own) for own in items]},
        "dense": [[user, -1.0] for user in users],
    }


def write_manifest(folder: Path, **changed: Any) -> Path:
    """Write a manifest without a program, for a loader."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / "package.json.new"  # a server that looks for changes never reads a part
    whole.write_text(json.dumps({**MANIFEST, **changed}))
    whole.replace(folder / "package.json")
    return folder


def load_small(folder: Path) -> Small:
    """Load the program: its scale is the version."""
    return Small(float(json.loads((folder / "package.json").read_text())["version"]))


LOADER = f"{__name__}:load_small"
