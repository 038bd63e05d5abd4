"""The comparison of names and signatures with an installed TorchRec."""
