"""Cross networks: layers ``x_{l+1} = x_0 * f_l(x_l) + x_l``, with learnable products of features.

DCN-V2, with matrices and with low ranks: Wang and others 2020, arXiv:2008.13535.

Legend: N features, L layers, r rank, B batch.

TorchScript and `torch.fx` read annotations, so they are no text here.
"""

import torch
from torch import Tensor, nn

import shardwright as sw


def _kernels(count: int, *shape: int) -> nn.ParameterList:
    """Weights of `count` layers, normal with Xavier's variance."""
    return nn.ParameterList([nn.Parameter(nn.init.xavier_normal_(torch.empty(*shape))) for _ in range(count)])


def _zeros(count: int, *shape: int) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.zeros(*shape)) for _ in range(count)])


class CrossNet(nn.Module):
    """Crosses with full matrices: ``x_{l+1} = x_0 * (W_l x_l + b_l) + x_l``.

    Args:
        in_features: ``N``.
        num_layers: ``L``.
    """

    def __init__(self, in_features: int, num_layers: int) -> None:
        super().__init__()
        self.kernels = _kernels(num_layers, in_features, in_features)
        self.bias = _zeros(num_layers, in_features, 1)

    def forward(self, input: Tensor) -> Tensor:
        """``[B, N]`` -> ``[B, N]``."""
        crossed = input
        for kernel, bias in zip(self.kernels, self.bias, strict=True):
            crossed = input * (crossed @ kernel.T + bias.squeeze(1)) + crossed
        return crossed


class LowRankCrossNet(nn.Module):
    """Crosses with products of two thin matrices: ``x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l``.

    Args:
        in_features: ``N``.
        num_layers: ``L``.
        low_rank: ``r``.
    """

    def __init__(self, in_features: int, num_layers: int, low_rank: int = 1) -> None:
        super().__init__()
        if low_rank < 1:
            raise sw.InvalidInputError(f"LowRankCrossNet: low_rank must be 1 or more, got {low_rank}")
        self.W_kernels = _kernels(num_layers, in_features, low_rank)
        self.V_kernels = _kernels(num_layers, low_rank, in_features)
        self.bias = _zeros(num_layers, in_features)

    def forward(self, input: Tensor) -> Tensor:
        """``[B, N]`` -> ``[B, N]``."""
        crossed = input
        for wide, thin, bias in zip(self.W_kernels, self.V_kernels, self.bias, strict=True):
            crossed = input * (crossed @ thin.T @ wide.T + bias) + crossed
        return crossed
