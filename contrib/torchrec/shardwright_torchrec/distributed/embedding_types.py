"""Lists of features, and the base of sharders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import shardwright as sw
from shardwright_torchrec.streamable import Multistreamable

__all__ = ["BaseEmbeddingSharder", "KJTList"]

BaseEmbeddingSharder = sw.ModuleSharder


class KJTList(Multistreamable):
    """A list of features.

    Args:
        features: the features.
    """

    def __init__(self, features: Sequence[sw.KeyedJaggedTensor]) -> None:
        self.features = list(features)

    def __len__(self) -> int:
        return len(self.features)

    def __setitem__(self, key: int, item: sw.KeyedJaggedTensor) -> None:
        self.features[key] = item

    def __getitem__(self, key: int) -> sw.KeyedJaggedTensor:
        return self.features[key]

    def __iter__(self) -> Iterator[sw.KeyedJaggedTensor]:
        return iter(self.features)

    def record_stream(self, stream: Any) -> None:
        """Keep the memory of all until the stream is done with it."""
        for feature in self.features:
            feature.record_stream(stream)
