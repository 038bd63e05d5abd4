"""Small parts of TorchRec's package of that name."""
