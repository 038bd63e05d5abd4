"""The built-in optimizers of embedding rows, as FBGEMM's documentation and the papers have them.

They come in by the entry point of the built-in compute kernels, none of which trains without one.
"""

from __future__ import annotations

from shardwright.contracts import Optimizer
from shardwright.hookspecs import hookimpl
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
