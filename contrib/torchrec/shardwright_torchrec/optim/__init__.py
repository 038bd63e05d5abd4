"""Optimizers under TorchRec's names."""
