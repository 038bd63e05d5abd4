"""The built-in codecs. Thin: torch is imported when something is encoded."""

from __future__ import annotations

from shardwright.contracts import Codec
from shardwright.hookspecs import hookimpl
from shardwright_plugins.codecs.bf16 import Bf16
from shardwright_plugins.codecs.fp16 import Fp16
from shardwright_plugins.codecs.fp32 import Fp32
from shardwright_plugins.codecs.int8 import Int8


@hookimpl
def shardwright_codecs() -> list[type[Codec]]:
    """Offer the built-in codecs."""
    return [Bf16, Fp16, Fp32, Int8]
