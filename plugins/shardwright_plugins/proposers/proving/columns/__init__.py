"""Column generation: plans of many tables that are alike over many ranks, from patterns of what a rank holds."""
