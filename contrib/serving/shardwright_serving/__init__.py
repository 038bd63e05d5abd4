"""A server of exported recommender models over HTTP, with dynamic batching.

``python -m shardwright_serving PACKAGE`` starts it; README.md says what it answers.
"""

from __future__ import annotations

from shardwright_serving.manifest import Dense, Feature, Manifest, Output, PackageError
from shardwright_serving.settings import Settings

__all__ = ["Dense", "Feature", "Manifest", "Output", "PackageError", "Settings"]
