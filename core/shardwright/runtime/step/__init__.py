"""A training step: what its parts are, headers, and the joint with autograd."""
