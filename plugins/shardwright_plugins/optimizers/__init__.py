"""The built-in optimizers of embedding rows, as FBGEMM's documentation and the papers have them."""

from __future__ import annotations

from shardwright.contracts import Extension, Optimizer
from shardwright.hookspecs import hookimpl
from shardwright_plugins.imported import imported, names_of
from shardwright_plugins.optimizers.adagrad import Adagrad, RowWiseAdagrad
from shardwright_plugins.optimizers.adam import Adam, AdamW, PartialRowWiseAdam
from shardwright_plugins.optimizers.descent import Sgd
from shardwright_plugins.optimizers.ftrl import Ftrl
from shardwright_plugins.optimizers.layerwise import Lamb, Lars, PartialRowWiseLamb


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
    return [
        imported(
            "gradients:over_ranks",
            "shardwright_plugins.optimizers.over_ranks:over_ranks",
            "Norms, sums, means and extremes of gradients of sharded tables, over all ranks.",
        ),
        names_of(
            "names:clipping",
            ("shardwright_plugins.optimizers.clipping",),
            "Clipping of gradients by their norm over all ranks.",
        ),
        names_of(
            "names:optimizers",
            ("shardwright_plugins.optimizers.torch_optimizers",),
            "Torch optimizers that update the rows which a batch used.",
        ),
        imported(
            "torch_optimizers:built_in",
            "shardwright_plugins.optimizers.torch_optimizers:fused",
            "SGD, Adagrad, Adam, RowWiseAdagrad and LazyAdam in the backward pass.",
        ),
    ]
