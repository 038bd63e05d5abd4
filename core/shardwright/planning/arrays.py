"""The columns of which planning is made, and the marks that stand in them."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]

FREE = -1
"""The rank, or rank inside a host, of a shard that may go to any."""

NO_GANG = -1
"""The gang of a shard that needs no other on its host."""
