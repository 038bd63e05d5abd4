"""Serving of models that shardwright trained: quantized tables, packages that torch alone runs, and an HTTP server.

Names are imported on first use: the server (``python -m shardwright_serving PACKAGE``) needs torch, and nothing of
shardwright.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright_serving.packages.export import export_for_inference as export_for_inference
    from shardwright_serving.packages.increments import add_increment as add_increment
    from shardwright_serving.packages.manifest import Manifest as Manifest
    from shardwright_serving.packages.manifest import PackageError as PackageError
    from shardwright_serving.packages.package import InferencePackage as InferencePackage
    from shardwright_serving.packages.package import load_package as load_package
    from shardwright_serving.rows.formats import FORMATS as FORMATS
    from shardwright_serving.rows.quantized_rows import QuantizedRows as QuantizedRows
    from shardwright_serving.rows.quantized_rows import quantize_rows as quantize_rows
    from shardwright_serving.server.settings import Settings as Settings
    from shardwright_serving.tables.collections import (
        QuantEmbeddingBagCollection as QuantEmbeddingBagCollection,
    )
    from shardwright_serving.tables.collections import QuantEmbeddingCollection as QuantEmbeddingCollection
    from shardwright_serving.tables.known_ids import KnownIds as KnownIds
    from shardwright_serving.tables.known_ids import with_zero_row as with_zero_row
    from shardwright_serving.tables.one_process import shard_for_serving as shard_for_serving
    from shardwright_serving.tables.placed_collections import (
        PlacedQuantEmbeddingBagCollection as PlacedQuantEmbeddingBagCollection,
    )
    from shardwright_serving.tables.placed_collections import (
        PlacedQuantEmbeddingCollection as PlacedQuantEmbeddingCollection,
    )
    from shardwright_serving.tables.quantizing import quantize_embeddings as quantize_embeddings
    from shardwright_serving.tables.sharders import (
        QuantEmbeddingBagCollectionSharder as QuantEmbeddingBagCollectionSharder,
    )
    from shardwright_serving.tables.sharders import (
        QuantEmbeddingCollectionSharder as QuantEmbeddingCollectionSharder,
    )

_MODULE_OF_NAME = {
    name: module
    for module, names in {
        "packages.export": ("export_for_inference",),
        "packages.increments": ("add_increment",),
        "packages.manifest": ("Manifest", "PackageError"),
        "packages.package": ("InferencePackage", "load_package"),
        "rows.formats": ("FORMATS",),
        "rows.quantized_rows": ("QuantizedRows", "quantize_rows"),
        "server.settings": ("Settings",),
        "tables.collections": ("QuantEmbeddingBagCollection", "QuantEmbeddingCollection"),
        "tables.known_ids": ("KnownIds", "with_zero_row"),
        "tables.one_process": (
            "PlacedQuantEmbeddingBagCollection",
            "PlacedQuantEmbeddingCollection",
            "shard_for_serving",
        ),
        "tables.quantizing": ("quantize_embeddings",),
        "tables.sharders": ("QuantEmbeddingBagCollectionSharder", "QuantEmbeddingCollectionSharder"),
    }.items()
    for name in names
}

__all__ = sorted(_MODULE_OF_NAME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    module = _MODULE_OF_NAME.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return __all__
