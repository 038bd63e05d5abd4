"""Constants of TorchRec 1.8's planner; memory is in bytes, bandwidths in bytes a millisecond."""

from __future__ import annotations

_GIB = 1024**3
BATCH_SIZE: int = 512
BIGINT_DTYPE: int = 8
CROSS_NODE_BANDWIDTH: float = 12.5 * _GIB / 1000
DDR_CAP: int = 128 * _GIB
DDR_MEM_BW: float = 51 * _GIB / 1000
HBM_CAP: int = 32 * _GIB
HBM_MEM_BW: float = 897 * _GIB / 1000
HBM_TO_DDR_MEM_BW: float = 32 * _GIB / 1000
INTRA_NODE_BANDWIDTH: float = 600 * _GIB / 1000
MIN_CW_DIM: int = 128
NUM_POOLINGS: float = 1.0
POOLING_FACTOR: float = 1.0
UVM_CACHING_RATIO: float = 0.2
