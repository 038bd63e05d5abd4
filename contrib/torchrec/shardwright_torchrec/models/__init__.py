"""Models under TorchRec's names, with its parameter names, so that its checkpoints load."""
