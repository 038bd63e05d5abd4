"""Packing shards into ranks: what proposers and partitioners have in common."""
