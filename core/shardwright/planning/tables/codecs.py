"""Codecs of results and gradients between ranks: TorchRec's ``QCommsConfig``, for a module's tables or for one."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

from attrs import asdict, field, frozen

from shardwright.arguments import as_value, brief, not_empty, typed
from shardwright.errors import PlanningError
from shardwright.host.process import process_host
from shardwright.planning.plugin_calls import calling

if TYPE_CHECKING:
    from shardwright.contracts.codec import Codec
    from shardwright.host.registry import Registry

FLOAT_BYTES = 4
"""Results and gradients travel as float32 unless a codec says otherwise."""


def _name(value: str | Enum | None) -> str | None:
    """A name, or a member of an enumeration whose ``value`` is the name."""
    plain: str | None = getattr(value, "value", value)  # type: ignore[arg-type]
    return plain


@frozen(field_transformer=typed)
class QCommsConfig:
    """The codecs of results (forward) and of gradients (backward); the two are chosen apart.

    Args:
        forward_precision: name of the codec that results of lookups travel by, such as ``CommType.FP16``; ``None``
            leaves it to what the whole module uses, which is float32 by default.
        backward_precision: likewise for the gradients of those results.

    Raises:
        InvalidInputError: a precision is no name.

    Example:
        >>> import shardwright as sw
        >>> config = sw.QCommsConfig(forward_precision="fp16", backward_precision="bf16")
        >>> constraint = sw.ParameterConstraints(qcomms_config=config)
    """

    forward_precision: str | None = field(default=None, converter=_name, validator=not_empty)
    backward_precision: str | None = field(default=None, converter=_name, validator=not_empty)

    def over(self, other: QCommsConfig | None) -> QCommsConfig:
        """Fill in what this leaves open from ``other``."""
        if other is None:
            return self
        return QCommsConfig(
            self.forward_precision or other.forward_precision,
            self.backward_precision or other.backward_precision,
        )

    def resolved(self) -> QCommsConfig:
        """Replace aliases by the names they stand for.

        Raises:
            UnknownPluginError: no codec has such a name; the text has the known names and the nearest.
        """
        codecs = _codecs()
        names = (self.forward_precision, self.backward_precision)
        return QCommsConfig(*(name and codecs.canonical(name) for name in names))

    @property
    def forward(self) -> Codec | None:
        """The codec of results; ``None`` where they travel as they are."""
        return _create(self.forward_precision)

    @property
    def backward(self) -> Codec | None:
        """The codec of gradients; ``None`` where they travel as they are."""
        return _create(self.backward_precision)

    def result_row_bytes(self, num_columns: int) -> int:
        """Bytes of a result's vector between ranks, for costs."""
        return _row_bytes(self.forward, num_columns)

    def gradient_row_bytes(self, num_columns: int) -> int:
        """Bytes of a gradient's vector between ranks, for costs."""
        return _row_bytes(self.backward, num_columns)

    def to_data(self) -> dict[str, str]:
        """Return JSON data: what is said, and nothing else."""
        return asdict(self, filter=lambda _, value: value is not None)


def as_qcomms(value: QCommsConfig | Mapping[str, Any] | None) -> QCommsConfig | None:
    """Codecs as they are; JSON data of them as such."""
    config: QCommsConfig | None = as_value(QCommsConfig, value)
    return config


def codecs_of(config: QCommsConfig | None) -> list[Codec]:
    """The codecs that a configuration names, those that change nothing among them."""
    names = (config.forward_precision, config.backward_precision) if config is not None else ()
    return [_codecs().create(name) for name in names if name]


def _codecs() -> Registry[Codec]:
    return cast("Registry[Codec]", process_host().codecs)


def _create(name: str | None) -> Codec | None:
    codec = _codecs().create(name) if name else None
    return None if codec is None or codec.is_identity else codec


def _row_bytes(codec: Codec | None, num_columns: int) -> int:
    if codec is None:
        return FLOAT_BYTES * num_columns
    who = f"codec {codec.name!r}"
    with calling(who):
        size = codec.row_bytes(num_columns)
    if type(size) is not int or size < 1:
        raise PlanningError(
            f"{who} broke its contract: row_bytes({num_columns}) must be bytes, 1 at least; it is {brief(size)}"
        )
    return size
