"""The model's arithmetic against plain loops."""

from __future__ import annotations

import torch

from shardwright import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from shardwright_plugins.commands.demo.examples import NUM_DENSE
from shardwright_plugins.commands.demo.model import DLRM, interact


def test_interact_equals_loop_over_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(3, 4, generator=generator)
    embeddings = torch.randn(3, 5, 4, generator=generator)
    expected = []
    for example in range(3):
        vectors = [dense[example], *embeddings[example]]
        products = [
            sum(float(a) * float(b) for a, b in zip(vectors[i], vectors[j], strict=True))
            for i in range(6)
            for j in range(i)
        ]
        expected.append([*dense[example].tolist(), *products])
    torch.testing.assert_close(interact(dense, embeddings), torch.tensor(expected))


def make_dlrm(device: str) -> DLRM:
    tables = [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=10, embedding_dim=4, feature_names=[f"f{i}"])
        for i in range(2)
    ]
    return DLRM(EmbeddingBagCollection(tables=tables, device=device), device)


def test_dlrm_logits_are_made_of_its_parts() -> None:
    torch.manual_seed(0)
    model = make_dlrm("cpu")
    dense = torch.randn(2, NUM_DENSE)
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=["f0", "f1"], values=torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([2, 0, 1, 1])
    )
    tables = [model.embeddings.state_dict()[f"embedding_bags.t{i}.weight"] for i in range(2)]
    pooled = torch.stack(
        [
            torch.stack([tables[0][1] + tables[0][2], tables[1][3]]),
            torch.stack([torch.zeros(4), tables[1][4]]),
        ]
    )
    expected = model.top(interact(model.bottom(dense), pooled)).flatten()
    torch.testing.assert_close(model(dense, features), expected)
