"""Helpers about jagged tensors that TorchRec's scripts name."""
