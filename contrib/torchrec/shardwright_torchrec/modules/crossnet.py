"""Cross networks: layers ``x_{l+1} = x_0 * f_l(x_l) + x_l``, with learnable products of features.

DCN: Wang and others 2017, arXiv:1708.05123. DCN-V2, with matrices, low ranks and experts: arXiv:2008.13535.

Legend: N features, L layers, r rank, K experts, B batch.

TorchScript and `torch.fx` read annotations, so they are no text here.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import shardwright as sw

__all__ = ["CrossNet", "LowRankCrossNet", "LowRankMixtureCrossNet", "VectorCrossNet"]


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


class VectorCrossNet(nn.Module):
    """Crosses with one vector a layer: ``x_{l+1} = x_0 * (w_l . x_l) + b_l + x_l``.

    Args:
        in_features: ``N``.
        num_layers: ``L``.
    """

    def __init__(self, in_features: int, num_layers: int) -> None:
        super().__init__()
        self.kernels = _kernels(num_layers, in_features, 1)
        self.bias = _zeros(num_layers, in_features, 1)

    def forward(self, input: Tensor) -> Tensor:
        """``[B, N]`` -> ``[B, N]``."""
        crossed = input
        for kernel, bias in zip(self.kernels, self.bias, strict=True):
            crossed = input * (crossed @ kernel) + bias.squeeze(1) + crossed
        return crossed


class LowRankMixtureCrossNet(nn.Module):
    """Crosses with several low-rank experts a layer, mixed by a softmax of gates.

    Expert ``i`` of layer ``l`` is ``x_0 * (U g(C g(V x_l)) + b)`` with activation ``g``.

    Args:
        in_features: ``N``.
        num_layers: ``L``.
        num_experts: ``K``.
        low_rank: ``r``.
        activation: ``g``.

    Raises:
        InvalidInputError: `num_experts` or `low_rank` is below 1.
    """

    def __init__(
        self,
        in_features: int,
        num_layers: int,
        num_experts: int = 1,
        low_rank: int = 1,
        activation: nn.Module | Callable[[Tensor], Tensor] = torch.relu,
    ) -> None:
        super().__init__()
        if min(num_experts, low_rank) < 1:
            raise sw.InvalidInputError(
                "LowRankMixtureCrossNet: num_experts and low_rank must be 1 or more, "
                f"got {num_experts} and {low_rank}"
            )
        self._num_experts, self._activation = num_experts, activation
        self.U_kernels = _kernels(num_layers, num_experts, in_features, low_rank)
        self.V_kernels = _kernels(num_layers, num_experts, low_rank, in_features)
        self.bias = _zeros(num_layers, in_features, 1)
        self.gates = nn.ModuleList(
            [nn.Linear(in_features, 1, bias=False) for _ in range(num_experts if num_experts > 1 else 0)]
        )
        self.C_kernels = _kernels(num_layers, num_experts, low_rank, low_rank)

    def forward(self, input: Tensor) -> Tensor:
        """``[B, N]`` -> ``[B, N]``."""
        crossed = input
        for layer in range(len(self.bias)):
            crossed = self._mixed(input, crossed, layer) + crossed
        return crossed

    def _mixed(self, first: Tensor, crossed: Tensor, layer: int) -> Tensor:
        experts = torch.stack(
            [self._expert(first, crossed, layer, expert) for expert in range(self._num_experts)], dim=2
        )
        if not self.gates:
            return experts.squeeze(2)
        weights = torch.cat([gate(crossed) for gate in self.gates], dim=1).softmax(dim=1)
        return torch.bmm(experts, weights.unsqueeze(2)).squeeze(2)

    def _expert(self, first: Tensor, crossed: Tensor, layer: int, expert: int) -> Tensor:
        hidden = self._activation(crossed @ self.V_kernels[layer][expert].T)
        hidden = self._activation(hidden @ self.C_kernels[layer][expert].T)
        return first * (hidden @ self.U_kernels[layer][expert].T + self.bias[layer].squeeze(1))
