"""Kernels over FBGEMM's table-batched embedding: weights on the device, or in the host's memory."""
