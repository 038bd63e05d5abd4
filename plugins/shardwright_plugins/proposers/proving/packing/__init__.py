"""Packing: shards in ranks within limits, and plans that are filled and repaired by local search."""
