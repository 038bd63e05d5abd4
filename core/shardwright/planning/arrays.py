"""The columns of which planning is made, the marks that stand in them, and the size of an id."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]

ID_BYTES = 8
"""Ids travel as 64-bit integers."""

FREE = -1
"""The rank, or rank inside a host, of a shard that may go to any."""

NO_GANG = -1
"""The gang of a shard that needs no other on its host."""
