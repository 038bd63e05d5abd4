"""Accelerators as ranks have them: their collectives watched, their memory and links measured."""
