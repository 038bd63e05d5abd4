"""Machines: ranks, their memory and links, and the memory that is reserved."""
