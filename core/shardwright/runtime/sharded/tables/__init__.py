"""Sharded tables: their blocks, parameters, state, initial weights, optimizers and gradients."""
