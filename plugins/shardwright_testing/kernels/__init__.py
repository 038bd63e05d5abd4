"""Compute kernels beside loops over single rows, and the blocks they are tested with."""
