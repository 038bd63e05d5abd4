"""The built-in commands beside those of core."""
