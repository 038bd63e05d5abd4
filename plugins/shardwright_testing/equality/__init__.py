"""Sharded equals unsharded: cases of training, what ranks do with them, and the comparison."""
