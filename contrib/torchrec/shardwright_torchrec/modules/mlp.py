"""Perceptrons: one linear layer with an activation, and stacks of such.

TorchScript and `torch.fx` read annotations, so they are no text here.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright_torchrec.modules.activation import SwishLayerNorm


class Perceptron(nn.Module):
    """A linear layer and an activation.

    Args:
        in_size: columns of the input.
        out_size: columns of the output.
        bias: the layer has a bias.
        activation: function or module after the layer.
        device: device of the weights.
        dtype: dtype of the weights.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        bias: bool = True,
        activation: nn.Module | Callable[[Tensor], Tensor] = torch.relu,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self._out_size, self._in_size = out_size, in_size
        self._linear = nn.Linear(in_size, out_size, bias=bias, device=device, dtype=dtype)
        self._activation_fn = activation

    def forward(self, input: Tensor) -> Tensor:
        """``[B, in_size]`` -> ``[B, out_size]``."""
        result: Tensor = self._activation_fn(self._linear(input))
        return result


class MLP(nn.Module):
    """A stack of perceptrons.

    Args:
        in_size: columns of the input.
        layer_sizes: columns of each layer's output.
        bias: layers have a bias.
        activation: `"relu"`, `"sigmoid"`, `"swish_layernorm"`, a function, a module, or a function that makes one.
        device: device of the weights.
        dtype: dtype of the weights.
        activation_on_last: the last layer has an activation too.

    Raises:
        InvalidInputError: there is no such activation.
    """

    def __init__(
        self,
        in_size: int,
        layer_sizes: list[int],
        bias: bool = True,
        activation: str | Callable[..., Any] | nn.Module = torch.relu,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        activation_on_last: bool = True,
    ) -> None:
        super().__init__()
        sizes = [in_size, *layer_sizes]
        last = len(layer_sizes) - 1
        layers = []
        for number, (columns, out) in enumerate(pairwise(sizes)):
            is_active = activation_on_last or number < last
            act = _activation(activation, out, device) if is_active else nn.Identity()
            layers.append(Perceptron(columns, out, bias, act, device, dtype))
        self._mlp = nn.Sequential(*layers)

    def forward(self, input: Tensor) -> Tensor:
        """``[B, in_size]`` -> ``[B, layer_sizes[-1]]``."""
        result: Tensor = self._mlp(input)
        return result


_NAMED: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "sigmoid": torch.sigmoid}


def _activation(activation: Any, columns: int, device: torch.device | None) -> Any:
    if activation == "swish_layernorm":
        return SwishLayerNorm(columns, device)
    if isinstance(activation, str):
        if activation not in _NAMED:
            raise sw.InvalidInputError(
                f"no activation {activation!r}. Known: {', '.join([*_NAMED, 'swish_layernorm'])}; or give a function"
            )
        return _NAMED[activation]
    return activation() if isinstance(activation, type) else activation
