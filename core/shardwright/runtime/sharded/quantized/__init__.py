"""Quantised collections over many ranks, or over the devices of one process."""
