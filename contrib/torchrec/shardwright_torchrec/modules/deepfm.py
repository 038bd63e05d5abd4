"""Factorisation machines: Guo and others 2017, arXiv:1703.04247.

TorchScript and `torch.fx` read annotations, so they are no text here.
"""

import torch
import torch.fx
from torch import Tensor, nn


def _flat(embeddings: list[Tensor]) -> Tensor:
    """All embeddings of a sample side by side: ``[B, N]``."""
    return torch.cat([embedding.flatten(1) for embedding in embeddings], dim=1)


torch.fx.wrap("_flat")  # the number of embeddings is not known in a trace


class DeepFM(nn.Module):
    """The deep part: a dense module over all embeddings of a sample.

    Args:
        dense_module: the module, usually an `MLP`.
    """

    def __init__(self, dense_module: nn.Module) -> None:
        super().__init__()
        self.dense_module = dense_module

    def forward(self, embeddings: list[Tensor]) -> Tensor:
        """Embeddings ``[B, ...]`` -> the module's output."""
        result: Tensor = self.dense_module(_flat(embeddings))
        return result


class FactorizationMachine(nn.Module):
    """Sum of the products of all pairs of a sample's values: ``((sum x)^2 - sum x^2) / 2``."""

    def forward(self, embeddings: list[Tensor]) -> Tensor:
        """Embeddings ``[B, ...]`` -> ``[B, 1]``."""
        values = _flat(embeddings)
        return 0.5 * (values.sum(dim=1, keepdim=True) ** 2 - (values**2).sum(dim=1, keepdim=True))
