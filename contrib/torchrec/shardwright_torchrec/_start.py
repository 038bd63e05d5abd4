"""Serves `torchrec` from the start of a process whose parent says so in its environment.

`shardwright_torchrec.pth`, which Python reads at its start, imports this module where the variable is set. Until
somebody imports `torchrec`, there is nothing but a finder, so that other processes start as quickly as ever.
"""

from __future__ import annotations

import sys

from shardwright_torchrec._waiting import Waiting

if not any(finder is Waiting for finder in sys.meta_path):
    sys.meta_path.insert(0, Waiting)  # type: ignore[arg-type]  # a class serves as a finder, as importlib's own do
