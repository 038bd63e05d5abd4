"""Kernels in plain torch, for any machine; the kernels with a cache of rows use their rows and updates."""
