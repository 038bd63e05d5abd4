"""Sharded modules: models, collections, tables, parameters, their state and their optimizers."""
