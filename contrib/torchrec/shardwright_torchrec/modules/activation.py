"""Activations.

TorchScript and `torch.fx` read annotations, so they are no text here.
"""

import torch
from torch import Tensor, nn


class SwishLayerNorm(nn.Module):
    """``x * sigmoid(LayerNorm(x))``.

    Args:
        input_dims: last dimensions of the input, over which it is normalised.
        device: device of the weights.
    """

    def __init__(self, input_dims: int | list[int] | torch.Size, device: torch.device | None = None) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(input_dims, device=device), nn.Sigmoid())

    def forward(self, input: Tensor) -> Tensor:
        """The activation, of the input's shape."""
        result: Tensor = input * self.norm(input)
        return result
