"""Rows of few bits: their formats, and the values that they hold."""
