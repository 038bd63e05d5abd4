"""Optimizers to apply in the backward pass, by the names that FBGEMM has for them."""

from __future__ import annotations

import torch

__all__ = ["SGD", "Adagrad", "Adam"]


class SGD(torch.optim.SGD):
    """Stochastic gradient descent."""


class Adagrad(torch.optim.Adagrad):
    """Adagrad: Duchi and others 2011."""


class Adam(torch.optim.Adam):
    """Adam: Kingma and Ba 2014."""
