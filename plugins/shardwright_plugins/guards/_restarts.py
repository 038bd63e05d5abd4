"""Warning for restarts by ``torchrun`` whose ranks may not connect."""

from __future__ import annotations

import logging
import os
from functools import cache

_log = logging.getLogger("shardwright")


@cache
def warn_of_restarts() -> None:
    """Warn once if ``torchrun`` allows restarts over a store that outlives the attempts.

    Torch 2.13 gives no attempt a prefix in that store: ranks that are started again find the addresses, and the
    identifiers of NCCL, of those that are gone.
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    _log.warning(
        "torchrun may start the ranks again (--max-restarts %s), but they would find the addresses of the ranks before "
        "them in its store, and may fail to connect. Start it as TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun "
        "--rdzv-backend c10d ..., or --standalone on one host",
        restarts,
    )
