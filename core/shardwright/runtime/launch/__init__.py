"""Ranks on this machine, started by a script or a notebook."""
