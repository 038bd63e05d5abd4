"""Cutting a table: row maps, blocks, layouts and dataflows."""
