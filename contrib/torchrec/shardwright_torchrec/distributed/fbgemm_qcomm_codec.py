"""TorchRec's call for codecs of collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import shardwright as sw


def get_qcomm_codecs_registry(
    qcomms_config: sw.QCommsConfig, comm_ops: Sequence[Any] | None = None, device: Any = None
) -> sw.QCommsConfig:
    """The value of a sharder's `qcomm_codecs_registry`: the configuration itself, which serves every collective.

    Args:
        qcomms_config: the codecs.
        comm_ops: not served: codecs are chosen for tables, not for collectives.
        device: any; codecs work on all devices.

    Raises:
        UnsupportedError: `comm_ops` are given.
    """
    if comm_ops is not None:
        raise sw.UnsupportedError(
            f"comm_ops={list(comm_ops)!r}: codecs are chosen for tables, not for collectives. Leave comm_ops out, and "
            "give tables that are to differ ParameterConstraints(qcomms_config=...)",
            subject="comm_ops",
            asked=list(comm_ops),
        )
    return qcomms_config
