"""The built-in optimizers of embedding rows, as FBGEMM's documentation and the papers have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.contracts import Extension, Optimizer
from shardwright.hookspecs import hookimpl
from shardwright_plugins.optimizers.adagrad import Adagrad, RowWiseAdagrad
from shardwright_plugins.optimizers.adam import Adam, AdamW, PartialRowWiseAdam
from shardwright_plugins.optimizers.descent import Sgd
from shardwright_plugins.optimizers.ftrl import Ftrl
from shardwright_plugins.optimizers.layerwise import Lamb, Lars, PartialRowWiseLamb


class Clipping(Extension):
    """Brings `shardwright.clip_grad_norm_`, for gradients of sharded tables and of dense parameters."""

    name = "names:clipping"
    help = "Clipping of gradients by their norm over all ranks."

    def load(self) -> Callable[[str], Any]:
        """The function that gives what has a public name."""
        from shardwright_plugins.optimizers import clipping

        return clipping.__dict__.__getitem__


class OverRanks(Extension):
    """Takes norms, sums and extremes of gradients of sharded tables over all ranks."""

    name = "gradients:over_ranks"
    help = "Norms, sums, means and extremes of gradients of sharded tables, over all ranks."

    def load(self) -> Callable[[], Any]:
        """The function that gives what does each of torch's operators."""
        from shardwright_plugins.optimizers.over_ranks import over_ranks

        return over_ranks


class TorchOptimizers(Extension):
    """Says which optimizers of torch the built-in ones stand for, and what does the same without sharding."""

    name = "torch_optimizers:built_in"
    help = "SGD, Adagrad, Adam, RowWiseAdagrad and LazyAdam in the backward pass."

    def load(self) -> Callable[[], Any]:
        """The function that lists them."""
        from shardwright_plugins.optimizers.torch_optimizers import fused

        return fused


class OptimizerNames(Extension):
    """Brings `shardwright.RowWiseAdagrad` and `shardwright.LazyAdam`, torch optimizers of rows."""

    name = "names:optimizers"
    help = "Torch optimizers that update the rows which a batch used."

    def load(self) -> Callable[[str], Any]:
        """The function that gives what has a public name."""
        from shardwright_plugins.optimizers import torch_optimizers

        return torch_optimizers.__dict__.__getitem__


@hookimpl
def shardwright_optimizers() -> list[type[Optimizer]]:
    """Offer the built-in optimizers."""
    return [
        Adagrad,
        Adam,
        AdamW,
        Ftrl,
        Lamb,
        Lars,
        PartialRowWiseAdam,
        PartialRowWiseLamb,
        RowWiseAdagrad,
        Sgd,
    ]


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer what optimizers bring beside updates."""
    return [Clipping, OptimizerNames, OverRanks, TorchOptimizers]
